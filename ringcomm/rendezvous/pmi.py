"""The key-value store that MPICH's mpirun keeps for its processes: version 1 of the PMI wire protocol.

Lines of ``name=value`` words on an inherited descriptor. A process that has said ``init`` must say
``finalize`` before it ends, or mpirun ends the others.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
from typing import Dict

from ..clock import Deadline
from ..errors import StartTimeoutError, StartupError

PIECE = 400
"""Longest value, in characters; mpirun allows 1024."""
MAX_PIECES, LINE_BYTES = 256, 1 << 16
"""Longer texts and lines are not what ringcomm has stored, or mpirun answers."""


class Pmi:
    """The connection of this process to mpirun; there is one, which lasts until the process ends.

    Args:
        descriptor: the value of ``PMI_FD``.
        deadline: the time limit of the first answers.

    Raises:
        StartupError: mpirun does not answer as version 1 of the protocol says.
    """

    def __init__(self, descriptor: int, deadline: Deadline) -> None:
        self._descriptor = descriptor
        self._pid = os.getpid()
        self._received = b""
        self._ask("cmd=init pmi_version=1 pmi_subversion=1", deadline)
        atexit.register(self._finalize)
        self._store = self._ask("cmd=get_my_kvsname", deadline).get("kvsname", "")

    def put(self, key: str, text: str, deadline: Deadline) -> None:
        """Store a text under a key, for all ranks after their next :meth:`barrier`."""
        value = text.encode().hex()
        pieces = [value[start : start + PIECE] for start in range(0, len(value), PIECE)]
        for number, piece in enumerate([f"{len(pieces):x}", *pieces]):
            self._ask(f"cmd=put kvsname={self._store} key={key}-{number} value={piece}", deadline)

    def get(self, key: str, deadline: Deadline) -> str:
        """The text that a rank has stored under a key before the last :meth:`barrier`.

        Raises:
            StartupError: the store does not hold such a text.
        """
        try:
            count = int(self._get(f"{key}-0", deadline), 16)
            if not 0 <= count <= MAX_PIECES:
                raise ValueError(count)
            pieces = [self._get(f"{key}-{number}", deadline) for number in range(1, count + 1)]
            return bytes.fromhex("".join(pieces)).decode()
        except ValueError:
            raise StartupError(f"The entry {key!r} of mpirun's key-value store is not valid.") from None

    def _get(self, key: str, deadline: Deadline) -> str:
        return self._ask(f"cmd=get kvsname={self._store} key={key}", deadline).get("value", "")

    def barrier(self, deadline: Deadline) -> None:
        """Wait until all ranks have called this."""
        self._ask("cmd=barrier_in", deadline)

    def _ask(self, line: str, deadline: Deadline) -> Dict[str, str]:
        try:
            os.write(self._descriptor, line.encode() + b"\n")
            answer = self._line(deadline).decode("ascii", "replace")
        except StartTimeoutError:
            raise  # It is an OSError as well.
        except OSError as problem:
            raise StartupError(f"mpirun's descriptor PMI_FD={self._descriptor} fails: {problem}.") from None
        words = dict(word.partition("=")[::2] for word in answer.split())
        if words.get("rc", "0") != "0" or not words:
            raise StartupError(f"mpirun has answered {answer!r:.80} to {line.split()[0]!r}.")
        return words

    def _line(self, deadline: Deadline) -> bytes:
        while b"\n" not in self._received:
            if not select.select([self._descriptor], [], [], deadline.remaining_s())[0]:
                raise StartTimeoutError(
                    "not all processes of mpirun have called init() in time (RINGCOMM_START_TIMEOUT)."
                )
            piece = os.read(self._descriptor, 4096)
            if not piece:
                raise StartupError("mpirun has closed its connection to this process (PMI_FD).")
            self._received += piece
            if len(self._received) > LINE_BYTES:
                raise StartupError(f"mpirun has sent a line of more than {LINE_BYTES} bytes (PMI_FD).")
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _finalize(self) -> None:
        if os.getpid() != self._pid:
            return  # A fork that ends must not finalize for the process that it was made from.
        # MPI_Finalize of another library may have said it before.
        with contextlib.suppress(OSError, StartupError):
            self._ask("cmd=finalize", Deadline(1.0))
