"""``help()`` of everything public is enough: own text, every parameter, what is returned and raised."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from dataclasses import is_dataclass
from enum import Enum
from typing import Any, Iterator, List, Tuple

import pytest

MODULES = ("ringcomm", "ringcomm.torch", "ringcomm.torch.distributed", "ringcomm.jax", "ringcomm.mlx")
MADE_ELSEWHERE = ("Context", "Handle", "ProcessGroupRingcomm")
"""Classes whose instances users get from a function, and do not construct."""


def public() -> Iterator[Tuple[str, str]]:
    for module in MODULES:
        framework = module.split(".")[1:2]
        if not framework or importlib.util.find_spec(framework[0]) is not None:
            names = importlib.import_module(module).__all__
            yield from ((module, name) for name in names)


def callables() -> List[Tuple[str, str]]:
    return [
        (module, name)
        for module, name in public()
        if callable(getattr(importlib.import_module(module), name))
        and not isinstance(getattr(importlib.import_module(module), name), Enum)
    ]


def problems(thing: Any) -> List[str]:
    """Return what a reader of ``help(thing)`` would miss."""
    text = inspect.cleandoc(thing.__doc__ or "")
    if not text:
        return ["no docstring of its own"]
    found = []
    if isinstance(thing, type):
        inherited = [base.__doc__ for base in thing.__mro__[1:] if base.__doc__]
        if thing.__doc__ in inherited:
            found.append("the docstring of a base class")
    if re.search(r"^\s*\{\w+\}\s*$", text, re.MULTILINE):
        found.append("an unresolved placeholder")
    if re.match(r"(See|Like|As) :", text):
        found.append("a reference instead of a description")
    if isinstance(thing, type):
        own = not issubclass(thing, (BaseException, Enum)) and not is_dataclass(thing)
        if not own or thing.__name__ in MADE_ELSEWHERE:
            return found
    signature = inspect.signature(thing)
    for parameter in signature.parameters.values():
        if not re.search(rf"^    (\*\*|\*)?{parameter.name}: ", text, re.MULTILINE):
            found.append(f"parameter {parameter.name} is not described")
    if not isinstance(thing, type):
        returns = signature.return_annotation not in (None, "None", inspect.Signature.empty)
        if returns and "Returns:\n" not in text:
            found.append("no Returns")
    return found


@pytest.mark.parametrize(("module", "name"), callables())
def test_help_is_enough(module: str, name: str) -> None:
    thing = getattr(importlib.import_module(module), name)
    if thing.__module__.startswith("ringcomm._adapter"):
        pytest.skip("shared by the adapters, and checked with them")
    assert problems(thing) == []


def test_methods_and_functions_share_their_description() -> None:
    import ringcomm
    from ringcomm.calls.collectives import Collectives
    from ringcomm.docstrings import SHARED

    process_set = "\n    ".join(["", *SHARED["direct_set"].split("\n")])
    shared = [name for name in vars(Collectives) if name in ringcomm.__all__]
    assert len(shared) >= 13
    for name in shared:
        method = inspect.getdoc(getattr(Collectives, name)) or ""
        function = (inspect.getdoc(getattr(ringcomm, name)) or "").replace(process_set, "")
        assert method.partition("Args:")[2].strip() in function, name
