"""Starts the agent from a cache on its host, so that its program is sent only once. Pure: makes text.

The agent is the process that starts and monitors the ranks of a host; its stdin and stdout, through ssh, are
the launcher's link to it. The loader is one line of Python that the launcher sends in place of the program,
to remote hosts (:meth:`.agent_process.AgentLink.start`). It names the program by its SHA-256; a file with
another content is not used. If the host does not have it, the loader sends :data:`WANTED`, keeps the frames
that come before the program (for example the job's configuration), and runs the program. The agent finds
these frames in ``sys.ringrun_early``, and in ``sys.ringrun_program`` the program to keep
(:func:`ringrun.agent.shipped.keep_program`). A host whose cache cannot be written receives the program at
every start.
"""

from __future__ import annotations

import hashlib

from ..agent import framing, shipped

WANTED = b"\nringrun-agent-wanted/1\n"
"""The loader's request for the program."""

_LOADER = """
import hashlib, os, stat, struct, sys, zlib
caches = os.environ.get("XDG_CACHE_HOME", "")
caches = caches if os.path.isabs(caches) else os.path.expanduser("~/.cache")
early = text = sys.ringrun_program = b""
try:
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(os.path.join(caches, {folder!r}, {digest!r}), flags), "rb") as file:
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            text = file.read(1 << 20)
        if hashlib.sha256(text).hexdigest() == {digest!r}:
            os.utime(file.fileno())
except OSError:
    pass
def take(count):
    found = b""
    while len(found) < count:
        piece = os.read(0, count - len(found))
        if not piece:
            raise SystemExit
        found += piece
    return found
if hashlib.sha256(text).hexdigest() != {digest!r}:
    os.write(1, {wanted!r})
    kind = 0
    while kind != {kind}:
        head = take(9)
        kind, length = struct.unpack("!BQ", head)
        text = take(length)
        early += b"" if kind == {kind} else head + text
    sys.ringrun_program = text
sys.ringrun_early = early
exec(zlib.decompress(text))
"""


def loader(program: bytes) -> bytes:
    """Return the first line for the agent's stdin, which :data:`ringrun.reach.protocol.BOOT` executes. The
    cache is used for compressed programs up to 1 MiB.
    """
    text = _LOADER.format(
        digest=hashlib.sha256(program).hexdigest(), wanted=WANTED, kind=framing.PROGRAM,
        folder=shipped.PROGRAMS,
    )  # fmt: skip
    return f"exec({text!r})\n".encode()
