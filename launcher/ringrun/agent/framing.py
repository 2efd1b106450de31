"""The frames between the launcher and an agent, by kind and length.

Standard library only: the launcher sends this file with :mod:`ringrun.agent.agent`, and uses it itself
(:mod:`ringrun.reach.protocol`).
"""

from __future__ import annotations

import struct

from ringrun.agent import processes

MARKER = b"\nringrun-agent/1\n"
TO_LAUNCHER = struct.Struct("!BiI")  # kind, rank, length
FRAME_END = b"\n"  # srun passes output on line by line
TO_AGENT = struct.Struct("!BQ")  # kind, length
STDOUT, STDERR, RESULT, EVENT, RECORD, FILE, NUMBERS = 1, 2, 3, 4, 5, 6, 7
JSON, PAYLOAD, PACKAGE, CODE, PROGRAM = 1, 2, 3, 4, 5  # PROGRAM: this one, see reach/protocol.py


def read_frame() -> bytes:
    """Return the content of the next frame on stdin."""
    return processes.read_exactly(TO_AGENT.unpack(processes.read_exactly(TO_AGENT.size))[1])
