"""No public name disappears: what users may have written into scripts is compared with the committed list.

    python -m tests.test_names_stay --write      adds new names to the list

The list (``names_that_stay.txt``) has exports, classes' public members, parameters, exceptions, command line
options, environment variables, the modules of the Horovod names, and ``python -m`` programs. A line leaves it
only together with an entry in CHANGELOG.md.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import re
import sys
from enum import Enum
from pathlib import Path
from typing import Any, FrozenSet, Iterator, Set

import click
import pytest

from ringcomm.config import Settings
from ringcomm.configuration.variables import MEMBERSHIP_VARIABLES
from ringrun.cli import ringrun
from tests.public_names import public_names, source_of

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "names_that_stay.txt"
MODULES = (
    "ringcomm", "ringcomm.errors", "ringcomm.torch", "ringcomm.torch.elastic", "ringcomm.torch.mpi_ops",
    "ringcomm.torch.compression", "ringcomm.torch.distributed", "ringcomm.tensorflow",
    "ringcomm.tensorflow.compression", "ringcomm.tensorflow.elastic", "ringcomm.tensorflow.keras",
    "ringcomm.tensorflow.keras.callbacks", "ringcomm.tensorflow.keras.elastic", "ringcomm.tensorflow.mpi_ops",
    "ringcomm.tensorflow.data.compute_service", "ringcomm.jax", "ringcomm.mlx", "ringcomm.keras",
    "ringcomm.keras.callbacks", "ringcomm.keras.elastic", "ringcomm.ray", "ringcomm.dask",
    "ringcomm.spark", "ringcomm.testing.cluster", "ringcomm.testing.contract", "ringcomm.testing.faulty",
    "ringcomm.mxnet", "ringcomm.lightning",
)  # fmt: skip
SHIM = ROOT / "launcher" / "ringrun" / "compat" / "horovod_shim"
MEMBERS = MODULES[:4] + ("ringcomm.torch.distributed",)
"""Modules of which parameters and members are listed as well; TensorFlow is not installed everywhere."""


def exported(module: str) -> Set[str]:
    """The public names of a module: its ``__all__``, or else what its source defines and exports again."""
    try:
        return public_names(module)
    except LookupError:
        pass
    path = source_of(module)
    names: Set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.ImportFrom) and node.level:
            package = module if path.name == "__init__.py" else module.rpartition(".")[0]
            parts = package.split(".")[: len(package.split(".")) - node.level + 1]
            source = ".".join([*parts, *([node.module] if node.module else [])])
            for alias in node.names:
                if alias.name == "*":
                    names.update(exported(source))
                elif alias.asname == alias.name:  # exported again, on purpose
                    names.add(alias.name)
    return {name for name in names if not name.startswith("_")}


def members(module: str) -> Iterator[str]:
    """Parameters of a module's functions and classes, and the public members of its classes."""
    loaded = importlib.import_module(module)
    for name in sorted(exported(module) & set(dir(loaded))):
        thing = getattr(loaded, name)
        if isinstance(thing, Enum) or not callable(thing) or not hasattr(thing, "__module__"):
            continue
        if not str(thing.__module__).startswith(("ringcomm", "ringrun")):
            continue
        yield from parameters(f"{module}.{name}", thing)
        if isinstance(thing, type):
            own = [base for base in thing.__mro__ if base.__module__.startswith("ringcomm")]
            for member in sorted({item for base in own for item in vars(base) if not item.startswith("_")}):
                yield f"member {module}.{name}.{member}"


def parameters(label: str, thing: Any) -> Iterator[str]:
    if isinstance(thing, type) and issubclass(thing, BaseException):
        return  # users catch errors and read their attributes
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return
    for parameter in signature.parameters.values():
        if not parameter.name.startswith("_"):
            yield f"parameter {label}({parameter.name})"


def options() -> Iterator[str]:
    for parameter in ringrun.params:
        if isinstance(parameter, click.Option):
            for option in (*parameter.opts, *parameter.secondary_opts):
                yield f"option ringrun {option}"


def variables() -> Iterator[str]:
    for field in Settings.__dataclass_fields__.values():
        yield f"variable {field.metadata['variable']}"
    for name, _ in MEMBERSHIP_VARIABLES:
        yield f"variable RINGCOMM_{name}"
    for top in (ROOT / "ringcomm", ROOT / "launcher" / "ringrun"):
        for path in top.rglob("*.py"):
            for name in re.findall(r"[\"'](HOROVOD_[A-Z][A-Z_]+[A-Z])[\"']", path.read_text()):
                yield f"variable {name}"


def programs() -> Iterator[str]:
    for path in (ROOT / "ringcomm").rglob("*.py"):
        if path.name == "__main__.py" or '__name__ == "__main__"' in path.read_text():
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            yield f"program python -m {name.replace('.__main__', '')}"


@functools.lru_cache(maxsize=None)
def names() -> FrozenSet[str]:
    """Everything public, as lines of the list; without frameworks that are not installed."""
    found = {f"name {module}.{name}" for module in MODULES for name in exported(module)}
    found.update(f"module horovod: {path.relative_to(SHIM)}" for path in SHIM.rglob("*.py"))
    found.update(options())
    found.update(variables())
    found.update(programs())
    for module in MEMBERS:
        if "torch" not in module or importlib.util.find_spec("torch") is not None:
            found.update(members(module))
    return frozenset(found)


def listed() -> Set[str]:
    return set(LIST.read_text().splitlines())


def test_no_public_name_has_disappeared():
    wanted = listed()
    if importlib.util.find_spec("torch") is None:
        wanted = {line for line in wanted if not re.match(r"(parameter|member) ringcomm\.torch", line)}
    assert not wanted - names(), "scripts may have these names; what replaces them belongs into CHANGELOG.md"


def test_new_names_are_listed():
    assert not names() - listed(), "python tests/test_names_stay.py --write"


@pytest.mark.parametrize(
    "line",
    [
        "name ringcomm.allreduce", "name ringcomm.errors.PeerLostError", "option ringrun --hosts",
        "variable RINGCOMM_DEAD_AFTER", "parameter ringcomm.allreduce(op)", "member ringcomm.Context.close",
        "program python -m ringcomm.newkey", "name ringcomm.keras.DistributedOptimizer",
    ],
)  # fmt: skip
def test_every_kind_of_name_is_found(line: str):
    assert line in names() and line in listed()


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        LIST.write_text("\n".join(sorted(names() | listed() if LIST.exists() else names())) + "\n")
    else:
        print("\n".join(sorted(names() ^ listed())))
