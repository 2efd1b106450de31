"""The attributes of a process group that PyTorch requires besides the collectives."""

from __future__ import annotations

from typing import Any, List

import torch
import torch.distributed as dist

BACKEND = "ringcomm"


class GroupFace(dist.ProcessGroup):
    """A process group's name, description, device and store.

    Args:
        rank: this process's rank in the group.
        size: number of ranks.
        name: the group's name.
        store: the group's part of PyTorch's store.
    """

    def __init__(self, rank: int, size: int, name: str, store: Any) -> None:
        # Without the store: with it, C++ would not call the methods that Python overrides.
        super().__init__(rank, size)
        self._name, self._desc = name, "undefined"
        self._store = store

    def getBackendName(self) -> str:  # noqa: N802 - PyTorch's name
        """The backend's name."""
        return BACKEND

    name = _get_backend_name = getBackendName

    @property
    def group_name(self) -> str:
        """The group's name."""
        return self._name

    @property
    def group_desc(self) -> str:
        """The group's description."""
        return self._desc

    def getGroupName(self) -> str:  # noqa: N802
        """The group's name, for C++."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set the group's name, from C++."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """The group's description, for C++."""
        return self._desc

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        """Set the group's description, from C++."""
        self._desc = desc

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    @property
    def _device_types(self) -> List[torch.device]:
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    def _get_backend(self, device: Any) -> GroupFace:
        return self

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def supports_tensor_alloc(self, device: Any) -> bool:
        """Always False: the backend allocates no tensors."""
        return False

    def get_group_store(self) -> Any:
        """The group's part of PyTorch's store."""
        return self._store

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self._name!r}, rank={self.rank()}, size={self.size()})"
