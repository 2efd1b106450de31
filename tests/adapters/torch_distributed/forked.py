"""Processes that need not import PyTorch, which takes seconds: they are forked from one that has done so."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import threading
from pathlib import Path
from typing import Any, Callable, Dict, Iterator

_context = multiprocessing.get_context("forkserver")
# The last one is what an optimizer imports at its first step.
_context.set_forkserver_preload(["ringcomm.torch.distributed", "torch.nn.parallel", "torch._dynamo"])


class Forked:
    """A process that calls a module's function with a connection and arguments, and its stderr."""

    def __init__(
        self, function: Callable[..., None], arguments: Any, variables: Dict[str, str], errors: Path
    ) -> None:
        self._connection, other = _context.Pipe()
        self._errors = errors
        everything = (function, other, arguments, variables, str(errors))
        self._process: Any = _context.Process(target=_run, args=everything)  # type: ignore[attr-defined]
        self._process.start()
        other.close()

    @property
    def errors(self) -> str:
        """What it has written to its standard error."""
        return self._errors.read_text() if self._errors.exists() else ""

    def send(self, message: Any) -> None:
        """Send it a message."""
        self._connection.send(message)

    def receive(self, limit_s: float) -> Any:
        """Return its next message; EOFError if it has ended."""
        assert self._connection.poll(limit_s), f"it has sent nothing for {limit_s:g} s: {self.errors}"
        return self._connection.recv()

    def messages(self, limit_s: float) -> Iterator[Any]:
        """Its messages up to its end."""
        try:
            while True:
                yield self.receive(limit_s)
        except (EOFError, ConnectionResetError):
            return

    def end(self, limit_s: float) -> int:
        """Its exit code when it has ended, or the negative number of the signal that has ended it."""
        self._process.join(limit_s)
        code = self._process.exitcode
        assert code is not None, f"it has not ended within {limit_s:g} s: {self.errors}"
        return code

    def close(self) -> None:
        """End it if it still runs."""
        self._process.kill()
        self._process.join()
        self._process.close()
        self._connection.close()


def _run(
    function: Callable[..., None], connection: Any, arguments: Any, variables: Dict[str, str], errors: str
) -> None:
    os.environ.clear()
    os.environ.update(variables)
    descriptor = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    import torch

    torch.set_num_threads(1)
    try:
        function(connection, *arguments)
    finally:
        # As in a process of its own. multiprocessing ends the process without this.
        threading._shutdown()
        atexit._run_exitfuncs()
