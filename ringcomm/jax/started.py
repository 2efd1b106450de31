"""The programs that a thread has started, and waiting for them."""

from __future__ import annotations

import threading
from typing import Any

import jax


class _Latest(threading.local):
    """The program of ``hvd.jit`` that a thread has started last."""

    done: Any = None  # a result of it that nothing else uses


latest = _Latest()


def wait() -> None:
    """Wait for this thread's programs of ``hvd.jit`` and ``jax.jit``; raise JAX's error if one failed."""
    done, latest.done = latest.done, None
    if done is not None:
        jax.block_until_ready(done)
    jax.effects_barrier()
