"""The object from which Horovod's own modules read rank, size and the like (``_basics``)."""

from __future__ import annotations

from typing import Any, Dict, List

from .. import api
from . import common


class HorovodBasics:
    """The functions that every adapter exports (``rank()``, ``size()``, ...), as attributes of one object."""

    def __init__(self, pkg_path: str = "", *args: Any) -> None:
        """Accept and ignore Horovod's arguments."""

    def __getattr__(self, name: str) -> Any:
        if name in vars(common)["__all__"]:
            return getattr(common, name)
        raise AttributeError(f"HorovodBasics has no {name!r} with ringcomm")

    def _get_process_set_ids_and_ranks(self) -> Dict[int, List[int]]:
        """Return the ranks of every registered process set, by its id."""
        sets = api.context().engine.sets
        return {number: list(sets.members(number)) for number in sets.numbers()}
