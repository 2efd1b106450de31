"""The socket of ``ringrun add`` and ``ringrun drop``: its answers, and users that it refuses."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Iterator, List, Mapping

import pytest

from ringcomm.errors import ConfigError
from ringrun.job.control_socket import (
    REQUEST_LIMIT_BYTES,
    ControlSocket,
    control_folder,
    running_jobs,
    send_command,
)

CONNECT = """
import os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
try:
    connection.sendall(b'{"do": "add", "host": "a"}\\n')
    print(connection.recv(1000))
except OSError as problem:
    print(type(problem).__name__)
"""

ABC = "abc".ljust(16, "0")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: those of Unix sockets have a limit."""
    with tempfile.TemporaryDirectory(prefix="ringrun-") as name:
        yield Path(name) / "sockets"


def test_requests_and_their_answers(folder: Path) -> None:
    seen: List[Mapping[str, Any]] = []

    def execute(command: Mapping[str, Any]) -> str:
        seen.append(command)
        if command["host"] == "bad":
            raise ConfigError("no such host")
        return "done"

    server = ControlSocket(ABC, execute, folder)
    server.start()
    try:
        assert running_jobs(folder) == [ABC]
        assert send_command(folder, ABC, {"do": "add", "host": "a"}) == "done"
        with pytest.raises(ConfigError, match="no such host"):
            send_command(folder, ABC, {"do": "drop", "host": "bad"})
        assert [item["host"] for item in seen] == ["a", "bad"]
        with socket.socket(socket.AF_UNIX) as silent:  # one that sends nothing does not stop others for long
            silent.connect(str(folder / f"{ABC}.sock"))
            silent.close()
        assert send_command(folder, ABC, {"do": "add", "host": "b"}) == "done"
    finally:
        server.stop()
    assert running_jobs(folder) == []
    with pytest.raises(ConfigError, match="does not answer"):
        send_command(folder, ABC, {"do": "add", "host": "a"})


def test_a_request_that_is_too_long_is_refused(folder: Path) -> None:
    seen: List[Mapping[str, Any]] = []
    server = ControlSocket(ABC, lambda command: str(seen.append(command)), folder)
    server.start()
    try:
        with pytest.raises(ConfigError, match="not valid"):
            send_command(folder, ABC, {"do": "add", "host": "a" * REQUEST_LIMIT_BYTES})
        assert seen == []
    finally:
        server.stop()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused_even_if_the_directory_is_open(folder: Path) -> None:
    seen: List[Mapping[str, Any]] = []
    server = ControlSocket(ABC, lambda command: str(seen.append(command)), folder)
    server.start()
    try:
        path = folder / f"{ABC}.sock"
        for item, mode in ((folder.parent, 0o755), (folder, 0o755), (path, 0o777)):
            item.chmod(mode)
        done = subprocess.run(
            [sys.executable, "-c", CONNECT, str(path)], capture_output=True, text=True, timeout=30, cwd="/"
        )
        assert done.stdout in ("b''\n", "BrokenPipeError\n", "ConnectionResetError\n"), done
        assert seen == []
        send_command(folder, ABC, {"do": "add", "host": "a"})
        assert len(seen) == 1
    finally:
        server.stop()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's directory")
def test_a_directory_of_another_user_is_not_used(folder: Path) -> None:
    folder.mkdir()
    os.chown(folder, 65534, 65534)
    with pytest.raises(ConfigError, match="belongs to another user"):
        ControlSocket(ABC, str, folder).start()


def test_the_directory_is_the_users_own(tmp_path: Path) -> None:
    assert control_folder({"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path / "ringrun"
    assert control_folder({"XDG_RUNTIME_DIR": "relative"}) == Path(f"/tmp/ringrun-{os.getuid()}")
    assert control_folder({}) == Path(f"/tmp/ringrun-{os.getuid()}")
