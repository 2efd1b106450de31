"""Unpickles data from a rank with another NumPy.

NumPy 2 calls the package with its functions ``numpy._core``, NumPy 1 calls it ``numpy.core``, and a pickle of
an array contains the name. NumPy 1 does not have the new name, and NumPy 2 warns of the old one.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, Union

import numpy as np

_NAMES = ("numpy._core", "numpy.core")
_OWN = _NAMES[0] if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else _NAMES[1]


class _Unpickler(pickle.Unpickler):
    """Finds NumPy's functions where the NumPy of this process has them."""

    def find_class(self, module: str, name: str) -> Any:
        for package in _NAMES:
            if module == package or module.startswith(f"{package}."):
                module = _OWN + module[len(package) :]
        return super().find_class(module, name)


class _View(io.RawIOBase):
    """A file that reads a view, which is not copied as a whole."""

    def __init__(self, data: Union[bytes, memoryview]) -> None:
        self._left = memoryview(data)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), len(self._left))
        buffer[:count] = self._left[:count]
        self._left = self._left[count:]
        return count


def unpickled(data: Union[bytes, memoryview]) -> Any:
    """Return the object in a pickle. This can execute any code, which may raise anything: the data must come
    from a rank of the job.
    """
    return _Unpickler(io.BufferedReader(_View(data))).load()
