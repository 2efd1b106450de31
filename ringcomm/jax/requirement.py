"""The oldest version of JAX that works."""

from __future__ import annotations

import re

import jax

OLDEST = (0, 6, 1)


def check(version: str) -> None:
    """Raise ImportError if this version of JAX is too old."""
    if tuple(int(part) for part in re.findall(r"\d+", version)[:3]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ImportError(
            f"ringcomm.jax requires JAX {oldest} or newer, and JAX {version} is installed. JAX {oldest} "
            "requires Python 3.10 or newer."
        )


check(jax.__version__)
