"""Arrays of other libraries on a CUDA device: by DLPack or ``__cuda_array_interface__``.

CuPy or PyTorch shares the array's memory and copies it. JAX's and TensorFlow's arrays on a GPU are such
arrays; they cannot be overwritten, and results go back to their libraries by DLPack.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, Hashable, Sequence, Tuple

import numpy as np

from ..errors import Misuse
from .kinds import CopyEngine, DeviceKind

_CUDA = 2
"""``kDLCUDA`` among DLPack's devices."""
_IMMUTABLE = ("jaxlib", "jax", "tensorflow")


def _library_of(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


class DlpackKind(DeviceKind):
    """Any array with ``__cuda_array_interface__``, or with ``__dlpack__`` on a CUDA device."""

    name = "DLPack"

    def on_device(self, value: Any) -> bool:
        if hasattr(value, "__dlpack_device__"):
            try:
                return int(value.__dlpack_device__()[0]) == _CUDA
            except Exception:  # noqa: BLE001 - an array that cannot say is one that is not exported
                return False
        return hasattr(value, "__cuda_array_interface__")

    def _shared(self, value: Any) -> Tuple[DeviceKind, Any]:
        """Return the array as one of CuPy or PyTorch that shares its memory, and the kind of that one."""
        cupy, torch = sys.modules.get("cupy"), sys.modules.get("torch")
        if cupy is None and (torch is None or not torch.cuda.is_available()):
            try:
                cupy = import_module("cupy")
            except ImportError:
                raise Misuse(
                    f"An array of {_library_of(value)} on a GPU is sent through CuPy or PyTorch, and neither "
                    "is there: pip install cupy-cuda12x, or pass an array in host memory."
                ) from None
        if cupy is not None:
            kind: DeviceKind = import_module(f"{__package__}.cupy_arrays").KIND
            exported = hasattr(value, "__dlpack__")
            return kind, cupy.from_dlpack(value) if exported else cupy.asarray(value)
        kind = import_module(f"{__package__}.torch_tensors").KIND
        assert torch is not None
        exported = hasattr(value, "__dlpack__")
        return kind, torch.from_dlpack(value) if exported else torch.as_tensor(value, device="cuda")

    def device(self, value: Any) -> Hashable:
        kind, shared = self._native(value)
        return (kind.name, kind.device(shared))

    def engine(self, value: Any) -> CopyEngine:
        kind, shared = self._native(value)
        return kind.engine(shared)

    def describe(self, value: Any) -> Tuple[Tuple[int, ...], np.dtype[Any]]:
        kind, shared = self._native(value)
        return kind.describe(shared)

    def _native(self, value: Any) -> Tuple[DeviceKind, Any]:
        """Do as :meth:`_shared`, also for arrays of CuPy and PyTorch, which this kind makes itself."""
        library = _library_of(value)
        if library in ("cupy", "torch"):
            name = "cupy_arrays" if library == "cupy" else "torch_tensors"
            kind: DeviceKind = import_module(f"{__package__}.{name}").KIND
            return kind, value
        return self._shared(value)

    def flat(self, value: Any) -> Tuple[Any, bool]:
        kind, shared = self._native(value)
        return kind.flat(shared)

    def empty(self, like: Any, shape: Sequence[int]) -> Any:
        kind, shared = self._native(like)
        return kind.empty(shared, shape)

    def assign(self, target: Any, source: Any) -> None:
        kind, shared = self._native(target)
        kind.assign(shared, self._native(source)[1])

    def result(self, array: Any, like: Any) -> Any:
        library = _library_of(like)
        if library in ("jaxlib", "jax"):
            return sys.modules["jax"].dlpack.from_dlpack(array)
        if library == "tensorflow":
            return sys.modules["tensorflow"].experimental.dlpack.from_dlpack(array.__dlpack__())
        return array

    def check_writable(self, value: Any, what: str) -> None:
        if _library_of(value) in _IMMUTABLE:
            raise Misuse(
                f"{what} works in place, and arrays of {_library_of(value)} cannot be overwritten. Without "
                "the trailing underscore it returns a new array."
            )


KIND = DlpackKind()
