"""Import hook that maps ``horovod.torch`` and other modules of Horovod to ringcomm's modules."""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Dict, Optional, Sequence, Tuple

TARGETS: Dict[str, Tuple[str, ...]] = {
    "tensorflow.keras": ("ringcomm.tensorflow.keras", "ringcomm.keras"),
    "tensorflow": ("ringcomm.tensorflow",),
    "torch": ("ringcomm.torch",),
    "keras": ("ringcomm.keras",),
    "mxnet": ("ringcomm.mxnet",),
    "ray": ("ringcomm.ray",),
    "spark": ("ringcomm.spark",),
    "common.elastic": ("ringcomm.elastic", "ringcomm.elastic.state"),
    "common.exceptions": ("ringcomm.errors",),
    "common.process_sets": ("ringcomm",),
    "common.basics": ("ringcomm._adapter.basics",),
}
"""ringcomm's modules for a module of Horovod, of which the first existing one is used."""

TITLES = {
    "tensorflow.keras": "Keras", "tensorflow": "TensorFlow", "torch": "PyTorch", "keras": "Keras",
    "mxnet": "MXNet", "ray": "Ray", "spark": "Spark", "common.elastic": "elastic training",
}  # fmt: skip

PARTS = (
    "mpi_ops", "functions", "compression", "optimizer", "sync_batch_norm", "util", "gradient_aggregation",
    "sampler", "state",
)  # fmt: skip
"""Submodules of Horovod's packages. Where ringcomm has no such submodule, its package has their names."""


class Forwarder(MetaPathFinder):
    """Finds modules below ``horovod`` that have no file in this package."""

    def find_spec(
        self, fullname: str, path: Optional[Sequence[str]] = None, target: Optional[ModuleType] = None
    ) -> Optional[ModuleSpec]:
        """Return the spec of ringcomm's module for one of Horovod; None leaves it to another finder."""
        top, _, rest = fullname.partition(".")
        if top != "horovod" or rest.split(".")[0] in ("", "_forward", "runner"):
            return None
        for prefix, candidates in TARGETS.items():
            if rest == prefix or rest.startswith(prefix + "."):
                name = _existing(candidates, rest[len(prefix) :])
                if name is None:
                    raise ModuleNotFoundError(_nothing(fullname, prefix), name=fullname)
                return ModuleSpec(fullname, _Alias(fullname, name, prefix))
        if rest.split(".")[0] == "common":
            return None
        there = ", ".join(f"horovod.{prefix}" for prefix in ("common", *filter(_has, TARGETS)))
        raise ModuleNotFoundError(
            f"{fullname} has no counterpart in ringcomm. There are: {there}.", name=fullname
        )


class _Alias(Loader):
    """Loads a module by importing another one."""

    def __init__(self, fullname: str, name: str, prefix: str) -> None:
        self.fullname, self.name, self.prefix = fullname, name, prefix
        self.spec: Any = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        try:
            module = importlib.import_module(self.name)
        except ModuleNotFoundError as problem:
            missing = problem.name or ""
            if not missing or missing.split(".")[0] in ("ringcomm", "horovod"):
                raise
            raise ImportError(
                f"{spec.name} needs {TITLES[self.prefix]}, but {sys.executable} cannot import {missing!r}. "
                f"Install it there: {sys.executable} -m pip install {missing.split('.')[0]}",
                name=missing,
            ) from problem
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The module was executed under its own name: restore the spec that the import system has replaced.
        module.__spec__ = self.spec
        if not hasattr(module, "__path__"):  # a module in ringcomm, a package in Horovod
            for part in PARTS:
                sys.modules.setdefault(f"{self.fullname}.{part}", module)


def _existing(candidates: Sequence[str], tail: str) -> Optional[str]:
    """Map a Horovod module to ringcomm's of that name, else to the package."""
    for package in candidates:
        name = package + tail
        while name != package and not _is_there(name):
            name, _, part = name.rpartition(".")
            if part not in PARTS:
                return None
        if _is_there(name):
            return name
    return None


def _is_there(name: str) -> bool:
    try:
        return name in sys.modules or find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _has(prefix: str) -> bool:
    return any(_is_there(name) for name in TARGETS[prefix])


def _nothing(fullname: str, prefix: str) -> str:
    from ringcomm.version import __version__

    if _has(prefix):
        return f"{fullname} has no counterpart in ringcomm {__version__}."
    return f"{fullname} cannot be imported: ringcomm {__version__} has nothing for {TITLES[prefix]} yet."
