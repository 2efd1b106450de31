"""Processes of other users of this machine: the attacker, and an unprivileged user that is attacked."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator, Mapping, Optional

OTHER_USER = 12345
VICTIM = 54321
SOURCES = os.pathsep.join(str(Path(__file__).resolve().parents[2] / name) for name in ("", "launcher"))


def become(user: int) -> str:
    """The first lines of a program: it becomes this user.

    It may not be able to read the modules any more then, so it imports what it needs before.
    """
    imports = "import json, locale, os, select, socket, sys, time"
    return f"{imports}; os.setgroups([]); os.setgid({user}); os.setuid({user})\n"


@contextmanager
def another_user(program: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Yield a process of another user that runs this Python program, after its first line of output."""
    process = subprocess.Popen(
        [sys.executable, "-c", become(OTHER_USER) + program, *map(str, arguments)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None and process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


def ringrun_as_victim(
    *words: str, environ: Optional[Mapping[str, str]] = None, user: int = VICTIM
) -> subprocess.CompletedProcess[str]:
    """Run a command of ``ringrun`` beside running a job, as an unprivileged user."""
    # That user cannot write what a measurement of coverage would.
    kept = {name: text for name, text in os.environ.items() if not name.startswith("COV")}
    modules = "ringrun.cli, ringrun.job.control, ringrun.reach.named_hosts"
    program = f"import {modules}\n{become(user)}ringrun.cli.main(sys.argv[1:])"
    return subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60, cwd="/",
        env={**kept, "PYTHONPATH": SOURCES, **(environ or {})},
    )  # fmt: skip


LOOKS = """
seen, ports, names, kept = [], set(), set(), []

def take(path):
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        data = os.read(file, 1 << 20)
    except OSError:
        data = b""
    os.close(file)
    seen.append(path.encode() + b": " + data)
    return data

for number in os.listdir("/proc"):
    if number.isdigit():
        for name in ("cmdline", "environ", "maps", "status", "mem", "fd/3", "fd/4", "fd/5"):
            take("/proc/" + number + "/" + name)
for line in (take("/proc/net/tcp") + take("/proc/net/tcp6")).splitlines():
    words = line.split()
    if words[3] == b"0A":
        ports.add((len(words[1]) > 20, int(words[1].rpartition(b":")[2], 16)))
for line in take("/proc/net/unix").splitlines():
    if b" @ringcomm" in line:
        names.add(line.split()[-1][1:])
for top in sys.argv[2:]:
    for folder, _, files in os.walk(top):
        for name in files:
            take(os.path.join(folder, name))
sys.stdout.buffer.write(b"\\n".join(seen) + b"\\nsaw %d ports\\n" % len(ports))
sys.stdout.flush()
"""
"""Reads what there is of processes, sockets, and files below the directories behind the first argument."""

KNOCKS = """
for is_6, port in ports:
    for _ in range(20):
        sock = socket.socket(socket.AF_INET6 if is_6 else socket.AF_INET)
        sock.setblocking(False)
        sock.connect_ex(("::1" if is_6 else sys.argv[1], port))
        kept.append(sock)
for name in names:
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    sock.connect_ex(b"\\0" + name)
    kept.append(sock)
for sock in kept:
    try:
        sock.send(b"GET / HTTP/1.1" * 100)
    except OSError:
        pass
"""
"""Behind it: sends nonsense to all ports of the address that is the first argument, and to Unix sockets.

Only for a host of its own: it does not ask whose they are.
"""
