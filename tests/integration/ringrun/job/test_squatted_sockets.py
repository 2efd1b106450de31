"""Another user has prepared the directory of the control sockets, or sockets in it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Iterator, List

import pytest

from ringrun.job.control import ControlSocket, ForeignFolderError, send_command
from tests.support.another_user import OTHER_USER, VICTIM, another_user, become, ringrun_as_victim

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
JOB = "0123456789abcdef"

FORGES = """
folder, name = sys.argv[1:3]
os.umask(0)
if not os.path.isdir(folder):
    os.mkdir(folder, 0o777)
sock = socket.socket(socket.AF_UNIX)
sock.bind(os.path.join(folder, name + ".sock"))
sock.listen()
facts = {"pid": 1, "program": "\\x1b[2Jtrain.py", "began_at": time.time(), "ranks": 2, "hosts": ["desk"],
         "elastic": True}
print("listening", flush=True)
while True:
    link = sock.accept()[0]
    try:
        request = json.loads(link.recv(1000) or b"{}")
        text = json.dumps(facts) if request.get("do") == "info" else "the job is being ended \\x1b]0;x\\x07"
        link.sendall(json.dumps({"ok": True, "text": text}).encode() + b"\\n")
    except (OSError, ValueError):
        pass
    link.close()
"""


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A directory that every user may write, as ``/tmp``."""
    with tempfile.TemporaryDirectory(prefix="ringrun-") as name:
        path = Path(name)
        path.chmod(0o1777)
        yield path


def ask(runtime: Path, *words: str) -> Any:
    done = ringrun_as_victim(*words, environ={"XDG_RUNTIME_DIR": str(runtime)})
    assert "Traceback" not in done.stderr and "\x1b" not in done.stdout + done.stderr, done
    return done


def test_a_directory_of_another_user_is_reported_and_its_sockets_are_not_believed(runtime: Path) -> None:
    with another_user(FORGES, runtime / "ringrun", JOB):
        done = ask(runtime, "stop", JOB)
    assert done.returncode == 1 and done.stdout == ""
    assert f"{runtime / 'ringrun'} belongs to another user (number {OTHER_USER})" in done.stderr
    assert "XDG_RUNTIME_DIR" in done.stderr


@pytest.mark.parametrize("kind", ["link", "open"])
def test_what_stands_in_the_place_of_the_directory(runtime: Path, kind: str) -> None:
    folder, other = runtime / "ringrun", runtime / "elsewhere"
    if kind == "open":  # of this user, but all users may put sockets there
        folder.mkdir()
        os.chown(folder, VICTIM, VICTIM)
        folder.chmod(0o777)
    else:
        other.mkdir(mode=0o700)
        os.chown(other, VICTIM, VICTIM)
        folder.symlink_to(other)
        os.chown(folder, OTHER_USER, OTHER_USER, follow_symlinks=False)
    done = ask(runtime, "ps")
    assert done.returncode == 1 and str(folder) in done.stderr
    assert ("other users may write" if kind == "open" else "another user") in done.stderr


def test_a_socket_of_another_user_in_the_own_directory_is_told_nothing(runtime: Path) -> None:
    """It was put there while the directory was open to all."""
    folder = runtime / "ringrun"
    folder.mkdir()
    folder.chmod(0o777)
    with another_user(FORGES, folder, JOB):
        os.chown(folder, VICTIM, VICTIM)
        folder.chmod(0o700)
        done = ask(runtime, "stop", JOB)
        assert done.returncode == 1 and "being ended" not in done.stdout
        assert f"it belongs to another user (number {OTHER_USER})" in done.stderr


def test_a_job_says_that_its_socket_has_no_place(runtime: Path) -> None:
    """Also one that is neither elastic nor verbose."""
    (runtime / "ringrun").mkdir()
    os.chown(runtime / "ringrun", OTHER_USER, OTHER_USER)
    with pytest.raises(ForeignFolderError, match=f"another user .number {OTHER_USER}."):
        ControlSocket(JOB, str, runtime / "ringrun").start()
    (runtime / "ringrun").rmdir()
    (runtime / "ringrun").symlink_to("/nonexistent")
    os.chown(runtime / "ringrun", OTHER_USER, OTHER_USER, follow_symlinks=False)
    with pytest.raises(ForeignFolderError, match="another user"):
        ControlSocket(JOB, str, runtime / "ringrun").start()


CONNECTS = """
sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[1])
try:
    sock.sendall(b'{"do": "add", "host": "a"}\\n')
    print("refused" if not sock.recv(1000) else "answered", flush=True)
except OSError:
    print("refused", flush=True)
"""


def test_another_user_is_refused_even_if_the_directory_is_open(runtime: Path) -> None:
    seen: List[Any] = []
    folder = runtime / "ringrun"
    server = ControlSocket(JOB, lambda command: str(seen.append(command)), folder)
    server.start()
    try:
        for path, mode in ((folder, 0o755), (folder / f"{JOB}.sock", 0o777)):
            path.chmod(mode)
        argv = [sys.executable, "-c", become(OTHER_USER) + CONNECTS, str(folder / f"{JOB}.sock")]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30, cwd="/", check=False)
        assert done.stdout == "refused\n" and seen == [], done
        send_command(folder, JOB, {"do": "add", "host": "a"})
        assert len(seen) == 1
    finally:
        server.stop()
