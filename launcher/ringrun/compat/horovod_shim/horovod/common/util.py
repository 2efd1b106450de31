"""Helper functions of Horovod that scripts and tests use."""

from __future__ import annotations

import functools
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Iterator, List, Sequence

from ringcomm._adapter import basics
from ringcomm.configuration.environment import exported


def gloo_built(verbose: bool = False) -> bool:
    """Return whether Gloo is available; True, because ringcomm's own links replace it."""
    return basics.gloo_built()


def mpi_built(verbose: bool = False) -> bool:
    """Return whether MPI is available."""
    return basics.mpi_built()


def nccl_built(verbose: bool = False) -> int:
    """The version of NCCL: 0, there is none."""
    return basics.nccl_built()


def ddl_built(verbose: bool = False) -> bool:
    """Return whether DDL is available."""
    return basics.ddl_built()


def ccl_built(verbose: bool = False) -> bool:
    """Return whether oneCCL is available."""
    return basics.ccl_built()


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether a framework is installed and ringcomm has an adapter for it."""
    try:
        return find_spec(ext_base_name) is not None and find_spec(f"ringcomm.{ext_base_name}") is not None
    except (ImportError, ValueError):
        return False


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Check that ringcomm has an adapter for a framework.

    Raises:
        ImportError: it has none, or the framework is not installed.
    """
    if not extension_available(ext_name.rpartition(".")[2]):
        raise ImportError(f"{ext_name}: ringcomm has no adapter for it, or the framework is not installed.")


def check_installed_version(name: str, version: str, exception: Any = None) -> None:
    """Do nothing: ringcomm does not depend on the version of a framework."""


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether a framework has a GPU."""
    if ext_base_name == "torch":
        return bool(import_module("torch").cuda.is_available())
    if ext_base_name == "tensorflow":
        return bool(import_module("tensorflow").config.list_physical_devices("GPU"))
    return False


_cache = functools.lru_cache(maxsize=None)


@contextmanager
def env(**kwargs: Any) -> Iterator[None]:
    """Set environment variables inside a ``with`` block; None removes a variable."""
    with exported({name: None if value is None else str(value) for name, value in kwargs.items()}):
        yield


def is_iterable(x: Any) -> bool:
    """Return whether an object can be iterated over."""
    return hasattr(x, "__iter__") or hasattr(x, "__getitem__")


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether a number is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(items: Sequence[Any], n: int) -> List[Sequence[Any]]:
    """Split a list into n pieces whose lengths differ by at most one."""
    size, longer = divmod(len(items), n)
    ends = [index * size + min(index, longer) for index in range(n + 1)]
    return [items[start:end] for start, end in zip(ends, ends[1:])]


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Return whether a version is at least ``major.minor.patch``; what follows the numbers does not count.

    Raises:
        ValueError: the target is not of that form.
    """
    if not (isinstance(ver, str) and isinstance(target, str)) or target.count(".") != 2:
        raise ValueError(
            f"two versions are needed, the second as major.minor.patch, not {ver!r} and {target!r}"
        )
    return _numbers(ver) >= _numbers(target)


def _numbers(version: str) -> List[int]:
    found = []
    for part in version.split("+")[0].split(".")[:3]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        found.append(int(digits or 0))
    return found + [0] * (3 - len(found))
