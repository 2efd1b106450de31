"""The class behind ``hvd.rank()`` and its like, for code that makes one itself."""

from __future__ import annotations

from typing import Any

from ringcomm._adapter import common


class HorovodBasics:
    """What every binding of Horovod's offers about a process and its job, as methods."""

    def __init__(self, pkg_path: str = "", *args: Any) -> None:
        """Nothing: the arguments name a compiled library, and there is none."""

    def __getattr__(self, name: str) -> Any:
        if name in common.__all__:
            return getattr(common, name)
        raise AttributeError(f"HorovodBasics has no {name!r} with ringcomm")
