"""The public names of a package, which are those that it imports from its modules.

Each is imported under its own name (``from .optimizer import DistributedOptimizer as DistributedOptimizer``):
by that type checkers and readers see that it is exported again.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Dict, List


def export(package: Dict[str, Any], *more: str) -> List[str]:
    """Set a package's ``__all__``, and return it. Type checkers, which see no assignment, take the imports.

    Args:
        package: its global variables. Modules are not exported, nor names with an underscore.
        more: further names: modules that are exported, and names that are imported when they are used.
    """
    own = (name for name, thing in package.items() if not isinstance(thing, ModuleType))
    names = package["__all__"] = sorted({*(name for name in own if not name.startswith("_")), *more})
    return names
