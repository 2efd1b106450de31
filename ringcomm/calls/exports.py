"""The public names of a package: those that it imports from its modules under their own name.

Written as ``from .optimizer import DistributedOptimizer as DistributedOptimizer``: type checkers take that as
an export.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Dict, List


def export(package: Dict[str, Any], *more: str) -> List[str]:
    """Set a package's ``__all__`` to its imported objects and ``more``, and return it.

    Modules and names with an underscore are exported only by ``more``.
    """
    own = (name for name, thing in package.items() if not isinstance(thing, ModuleType))
    names = package["__all__"] = sorted({*(name for name in own if not name.startswith("_")), *more})
    return names
