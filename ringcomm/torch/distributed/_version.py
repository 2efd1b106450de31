"""Whether this PyTorch has what a backend in Python needs: asked before anything else is imported."""

from __future__ import annotations

import re
import sys
import warnings
from typing import Tuple

import torch

OLDEST = (2, 4)
NEWEST_TRIED = (2, 13)


def check(version: str) -> None:
    """Say so if PyTorch is too old for the backend, or newer than any that it was tried with.

    Raises:
        ImportError: it is too old.
    """
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if found < OLDEST:
        raise ImportError(
            f"ringcomm.torch.distributed needs PyTorch {_text(OLDEST)} or later; this is {version}. Update "
            f"it ({sys.executable} -m pip install -U torch), or train with ringcomm.torch, which works from "
            "PyTorch 2.0 on."
        )
    if found > NEWEST_TRIED:
        warnings.warn(
            f"PyTorch {version} is newer than any that ringcomm.torch.distributed was tried with "
            f"({_text(NEWEST_TRIED)}). If something fails, a newer ringcomm or an older PyTorch may help.",
            RuntimeWarning,
            stacklevel=2,
        )


def _text(version: Tuple[int, ...]) -> str:
    return ".".join(map(str, version))


check(torch.__version__)
