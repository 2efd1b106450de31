"""Imports every module that registers algorithms; ``configuration.parsing.ALGORITHMS`` is the list."""

from __future__ import annotations

from importlib import import_module

from ..configuration.parsing import ALGORITHMS, OTHER_ALGORITHM_MODULES

for _module in sorted({*ALGORITHMS.values(), *OTHER_ALGORITHM_MODULES}):
    import_module(f"ringcomm.schedule.{_module}")
