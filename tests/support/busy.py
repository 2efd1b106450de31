"""Processes that compute, so that others wait for processors."""

from __future__ import annotations

import subprocess
from contextlib import ExitStack, contextmanager
from typing import Iterator


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many processes compute."""
    with ExitStack() as stack:
        for _ in range(processes):
            process = stack.enter_context(subprocess.Popen(["sh", "-c", "while :; do :; done"]))
            stack.callback(process.kill)
        yield
