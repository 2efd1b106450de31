"""The launcher through a private sshd on 127.0.0.1, whose host names are aliases in ssh's configuration."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Iterator, List, Optional

import pytest

from tests.proc.test_ringrun_support import MARK, Launched
from tests.support.service import free_port

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
pytestmark = [
    pytest.mark.skipif(not Path(SSHD).exists(), reason="no sshd: apt-get install openssh-server"),
    pytest.mark.skipif(os.geteuid() != 0, reason="a private sshd can only log in root here"),
    pytest.mark.skipif(shutil.which("ssh") is None, reason="no ssh client"),
]


class Sshd:
    """A private sshd with its own keys, and a client configuration with the aliases jetson1 and jetson2."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("host_key", "user_key"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True
            )
        self.port = free_port()
        Path("/run/sshd").mkdir(exist_ok=True)
        (folder / "sshd_config").write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {folder}/host_key\nPidFile none\n"
            f"AuthorizedKeysFile {folder}/user_key.pub\nPermitRootLogin yes\nStrictModes no\nUsePAM no\n"
            "PasswordAuthentication no\nKbdInteractiveAuthentication no\nMaxStartups 1:100:1\n"
        )
        self.trust((folder / "host_key.pub").read_text())
        (folder / "ssh_config").write_text(
            f"Host jetson1 jetson2 refused\n  HostName 127.0.0.1\n  Port {self.port}\n  User root\n"
            f"  IdentityFile {folder}/user_key\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {folder}/known_hosts\n  GlobalKnownHostsFile /dev/null\n"
        )
        self.log = (folder / "log").open("wb")
        self.process = subprocess.Popen(
            [SSHD, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=self.log, stdin=subprocess.DEVNULL
        )
        until = time.monotonic() + 10
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                break
            except OSError:
                assert time.monotonic() < until and self.process.poll() is None
                time.sleep(0.05)

    def trust(self, key: Optional[str]) -> None:
        """Set the host key that the client has accepted."""
        line = "" if key is None else f"[127.0.0.1]:{self.port} {' '.join(key.split()[:2])}\n"
        (self.folder / "known_hosts").write_text(line)

    @property
    def options(self) -> List[str]:
        return ["--ssh", f"ssh -F {self.folder}/ssh_config"]

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(10)
        self.log.close()


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    server = Sshd(tmp_path_factory.mktemp("sshd"))
    try:
        yield server
    finally:
        server.stop()


def start(
    sshd: Sshd, hosts: str, *command: str, cwd: Optional[Path] = None, options: tuple[str, ...] = ()
) -> Launched:
    return Launched(*sshd.options, "-H", hosts, "-x", MARK, "-x", "PYTHONPATH", *options, *command, cwd=cwd)


def test_ranks_run_on_this_and_on_other_hosts(sshd: Sshd, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os\n"
        "e = os.environ\n"
        "print(e['RINGCOMM_SLOT'], e['RINGCOMM_HOST'], os.getcwd(), e.get('SECRET'), 'SSH_CONNECTION' in e)\n"
        "print(len(os.pread(int(e['RINGCOMM_KEY_FD']), 99, 0)), '127.0.0.1' in e['RINGCOMM_RENDEZVOUS'])\n"
    )
    secret = 'it\'s $HOME "quoted"'
    done = start(sshd, "localhost:2,jetson1:2", "train.py", cwd=tmp_path, options=("-x", f"SECRET={secret}"))
    assert done.finish() == 0, done.err
    assert sorted(done.out.splitlines()) == [
        f"[jetson1:2] 1:0 jetson1 {tmp_path} {secret} True",
        "[jetson1:2] 64 False",
        f"[jetson1:3] 1:1 jetson1 {tmp_path} {secret} True",
        "[jetson1:3] 64 False",
        f"[localhost:0] 0:0 localhost {tmp_path} {secret} False",
        "[localhost:0] 64 True",
        f"[localhost:1] 0:1 localhost {tmp_path} {secret} False",
        "[localhost:1] 64 True",
    ]


def test_ctrl_c_reaches_remote_ranks(sshd: Sshd) -> None:
    launched = start(
        sshd,
        "localhost,jetson1",
        "sh",
        "-c",
        "trap 'echo asked; exit 0' INT; echo up; sleep 1001 & wait; wait",
    )
    launched.find("sleep 1001", 4)  # a shell and its sleep on each host
    launched.process.send_signal(signal.SIGINT)
    assert launched.finish() == 130
    assert "[jetson1:1] asked" in launched.out and "[localhost:0] asked" in launched.out


def fails(sshd: Sshd, *words: str) -> str:
    launched = start(sshd, "jetson1", "true")
    assert launched.finish(40.0) == 1
    assert [word for word in words if word not in launched.err] == [] and "Traceback" not in launched.err
    return launched.err


def test_host_key_not_accepted(sshd: Sshd) -> None:
    sshd.trust(None)
    try:
        text = fails(
            sshd, "jetson1: its host key has not been accepted", f"ssh -F {sshd.folder}/ssh_config jetson1"
        )
    finally:
        sshd.trust((sshd.folder / "host_key.pub").read_text())
    assert "BatchMode" not in text
