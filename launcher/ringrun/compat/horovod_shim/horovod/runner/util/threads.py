"""Functions that Horovod's own tests import from here."""

from __future__ import annotations

import threading
from typing import Any, Callable, Tuple


def in_thread(target: Callable[..., Any], args: Tuple[Any, ...] = ()) -> threading.Thread:
    """Start a function in a daemon thread, and return the thread."""
    thread = threading.Thread(target=target, args=args, daemon=True)
    thread.start()
    return thread
