"""Starts the agent from a cache on its host, so that its program is sent only once. Pure: makes text.

The agent is the process that starts and monitors the ranks of a host; its stdin and stdout, through ssh, are
the launcher's link to it. The loader is one line of Python that the launcher sends in place of the program,
to hosts other than its own (:meth:`.agent_process.Link.start`). It names the program by its SHA-256; a file
with another content is not used. If the host does not have it, the loader sends :data:`WANTED`, keeps the
frames (the job's configuration, for example) that come before the program, and stores the program. The agent
finds these frames in ``sys.ringrun_early``. A host whose cache cannot be written receives the program at
every start. So does one whose cache is not to be trusted: the loader has the conditions of
:func:`ringcomm.files.why_untrusted` in a short form, and removes only files with the names of programs.
"""

from __future__ import annotations

import hashlib

from ..agent import framing

WANTED = b"\nringrun-agent-wanted/1\n"
"""What the loader sends if the host does not have the program."""
KEPT_PROGRAMS = 3
"""The most programs in the cache: those used last. Every version of ringrun has another one."""

_LOADER = """
import hashlib, os, re, stat, struct, sys, zlib
caches = os.environ.get("XDG_CACHE_HOME", "")
caches = caches if os.path.isabs(caches) else os.path.expanduser("~/.cache")
folder = os.path.join(caches, "ringcomm-agent")
path = os.path.join(folder, {digest!r})
early = text = b""
def check():
    for place in (folder, os.path.realpath(folder)):
        last = True
        while True:
            facts = os.lstat(place)
            users = (os.geteuid(),) if last else (os.geteuid(), 0, os.stat("/").st_uid)
            link = stat.S_ISLNK(facts.st_mode)
            others = facts.st_mode & 0o022 and (last or not facts.st_mode & stat.S_ISVTX)
            if facts.st_uid not in users or (last and link) or (others and not link):
                raise OSError
            if place == os.path.dirname(place):
                break
            place, last = os.path.dirname(place), False
try:
    check()
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        text = file.read(1 << 20)
    os.utime(path)
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
    try:
        os.makedirs(folder, 0o700, exist_ok=True)
        check()
        new = path + str(os.getpid())
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.write(text)
        os.rename(new, path)
        names = [os.path.join(folder, name) for name in os.listdir(folder)]
        names = [name for name in names if re.fullmatch("[0-9a-f]{{64,80}}", os.path.basename(name))]
        for name in sorted(names, key=os.path.getmtime)[:-{kept}]:
            os.unlink(name)
    except OSError:
        pass
sys.ringrun_early = early
exec(zlib.decompress(text))
"""


def loader(program: bytes) -> bytes:
    """The first line for the agent's stdin, which :data:`ringrun.reach.protocol.BOOT` executes.

    Args:
        program: the agent's program, compressed with zlib; at most 1 MiB, or the cache is not used.
    """
    text = _LOADER.format(
        digest=hashlib.sha256(program).hexdigest(), wanted=WANTED, kind=framing.PROGRAM, kept=KEPT_PROGRAMS
    )
    return f"exec({text!r})\n".encode()


def program_frame(program: bytes) -> bytes:
    """The answer to :data:`WANTED`.

    Args:
        program: the agent's compressed program.
    """
    return framing.TO_AGENT.pack(framing.PROGRAM, len(program)) + program
