"""Check the version of PyTorch, before the modules that need it are imported."""

from __future__ import annotations

import re
import sys
import warnings
from typing import Tuple

import torch

from ...config import is_first_from_environment

OLDEST = (2, 4)
NEWEST_TESTED = (2, 13)


def check(version: str) -> None:
    """Warn on rank 0 of a PyTorch newer than any tested one; ImportError if it is too old."""
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if found < OLDEST:
        raise ImportError(
            f"ringcomm.torch.distributed needs PyTorch {_text(OLDEST)} or later; this is {version}. Update "
            f"it ({sys.executable} -m pip install -U torch), or train with ringcomm.torch, which works from "
            "PyTorch 2.0 on."
        )
    if found > NEWEST_TESTED and is_first_from_environment():
        warnings.warn(
            f"PyTorch {version} is newer than any that ringcomm.torch.distributed was tested with "
            f"({_text(NEWEST_TESTED)}). If something fails, a newer ringcomm or an older PyTorch may help.",
            RuntimeWarning,
            stacklevel=2,
        )


def _text(version: Tuple[int, ...]) -> str:
    return ".".join(map(str, version))


check(torch.__version__)
