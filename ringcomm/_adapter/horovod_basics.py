"""The object through which Horovod's own modules ask about a process and its job."""

from __future__ import annotations

from typing import Any, Dict, List

from .. import api
from . import common


class HorovodBasics:
    """What every adapter offers about a process and its job, as attributes of one object.

    Args:
        pkg_path, args: without effect; in Horovod they name a compiled library.
    """

    def __init__(self, pkg_path: str = "", *args: Any) -> None:
        """Takes Horovod's arguments."""

    def __getattr__(self, name: str) -> Any:
        if name in common.__all__:
            return getattr(common, name)
        raise AttributeError(f"HorovodBasics has no {name!r} with ringcomm")

    def _get_process_set_ids_and_ranks(self) -> Dict[int, List[int]]:
        """The ranks of every registered process set, by its id."""
        sets = api.context().engine.sets
        return {number: list(sets.members(number)) for number in sets.numbers()}
