"""Machines that join with a code, as processes: two homes and folders here stand for two machines."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Iterator, List, Tuple

import pytest

from tests.proc.test_ringrun_support import MARK, SOURCES, Launched
from tests.support.service import free_port

pytest.importorskip("spake2")
LIMIT_S = 60.0
PROGRAM = """
import os, sys, time
import numpy as np
import ringcomm as rc
rc.init()
total = rc.allreduce(np.ones(2) * (rc.rank() + 1), op=rc.Sum)
e = os.environ
print("sum", total[0], e["RINGCOMM_HOST"], e.get("TOKEN"), e.get("PASSED"), len(e["HOME"]) > 40, flush=True)
if "sleep" in sys.argv:
    time.sleep(600)
"""


class Joining:
    """A launcher that invites one machine, and `ringrun join` in another home, with the code on its stdin."""

    def __init__(
        self, folder: Path, *arguments: str, hosts: str = "localhost,join", stays: bool = False
    ) -> None:
        self.home, self.launcher = folder / "a home that is not the one of the launcher", folder / "launcher"
        for each in (self.home, self.launcher):
            each.mkdir()
        (self.launcher / "train.py").write_text(PROGRAM)
        shutil.copy(Path(__file__).parent / "programs" / "elastic_steps.py", self.launcher)
        (folder / "go-on").touch()
        self._folder, self._path = folder, f"{self._no_ssh(folder)}:{os.environ['PATH']}"
        self.launched = self.launch(hosts, *arguments)
        self.said = ""
        self.address, self.code = self._invitation()
        self.environ = {name: value for name, value in os.environ.items() if not name.startswith("RINGCOMM_")}
        self.environ.update({"HOME": str(self.home), "PYTHONPATH": SOURCES})
        self.environ.pop("XDG_CONFIG_HOME", None)
        flags = ["--stay", self.address, self.code] if stays else [self.address]
        if not stays:
            self.environ[MARK] = self.launched.mark
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ringrun", "join", "--yes", "--name", "desk", *flags],
            cwd=self.home, env=self.environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        assert self.process.stdin is not None
        self.process.stdin.write("" if stays else f"{self.code}\n")
        self.process.stdin.close()

    def launch(self, hosts: str, *arguments: str) -> Launched:
        """Start a job on these hosts."""
        return Launched(
            "-H", hosts, "-x", MARK, "-x", "PASSED=yes", "-x", "PYTHONPATH", "--ship",
            "-x", f"GO_ON={self._folder}/go-on", *arguments, cwd=self.launcher,
            env={"TOKEN": "secret", "PATH": self._path, "XDG_CONFIG_HOME": f"{self._folder}/configuration"},
        )  # fmt: skip

    @staticmethod
    def _no_ssh(folder: Path) -> Path:
        """A folder for PATH in which ssh leaves a trace."""
        (folder / "bin").mkdir()
        (folder / "bin" / "ssh").write_text(f"#!/bin/sh\ntouch {folder}/ssh-was-used\nexit 255\n")
        (folder / "bin" / "ssh").chmod(0o755)
        return folder / "bin"

    def _invitation(self) -> Tuple[str, str]:
        found = self.wait_for(r"ringrun join (\S+:\d+) (\d+(?:-[a-z]{5}){3})")
        return "127.0.0.1:" + found[1].rpartition(":")[2], found[2]

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Read the launcher's stderr until a line matches."""
        assert self.launched.process.stderr is not None
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until:
            line = self.launched.process.stderr.readline().decode()
            assert line, self.said
            self.said += line
            found = re.search(pattern, line)
            if found:
                return found
        raise AssertionError(self.said)

    def lines(self, count: int) -> List[str]:
        """So many lines of the ranks' output."""
        assert self.launched.process.stdout is not None
        return sorted(self.launched.process.stdout.readline().decode().strip() for _ in range(count))

    def finish(self) -> Tuple[int, int, str]:
        """The exit codes of both, and what the joined machine has said."""
        code = self.launched.finish(LIMIT_S)
        return code, self.process.wait(LIMIT_S), self.process.stdout.read() if self.process.stdout else ""

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.launched.end()


@pytest.fixture
def joining(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Joining]:
    made = Joining(tmp_path, *request.param)
    try:
        yield made
    finally:
        made.end()


def secrets_seen(pids: List[int], secret: str) -> List[int]:
    """The processes whose command lines or environments have a secret."""
    found = []
    for pid in pids:
        for name in ("cmdline", "environ"):
            try:
                if secret.encode() in Path(f"/proc/{pid}/{name}").read_bytes():
                    found.append(pid)
            except OSError:
                continue
    return found


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks into /proc")
@pytest.mark.parametrize("joining", [("train.py", "sleep")], indirect=True)
def test_a_joined_machine_takes_part_and_leaves_by_ctrl_c(joining: Joining, tmp_path: Path) -> None:
    assert joining.lines(2) == [
        "[desk:1] sum 3.0 desk None yes True",
        "[localhost:0] sum 3.0 localhost secret yes False",
    ]
    assert secrets_seen(list(joining.launched.pids()), joining.code.partition("-")[2]) == []
    shown = subprocess.run(
        [sys.executable, "-m", "ringrun", "ps"], env={**os.environ, "PYTHONPATH": SOURCES}, text=True,
        stdout=subprocess.PIPE,
    ).stdout  # fmt: skip
    assert "train.py" in shown
    joining.process.send_signal(signal.SIGINT)
    code, left, said = joining.finish()
    assert code == 255 and "the host desk was lost first" in joining.launched.err, joining.launched.err
    assert "its user has ended it there" in joining.launched.err, joining.launched.err + said
    assert left == 130 and "this machine has left the job" in said
    assert "train.py sleep" in said and "one rank" in said
    assert not (tmp_path / "ssh-was-used").exists()


@pytest.mark.parametrize("joining", [("train.py",)], indirect=True)
def test_the_end_of_a_job_is_the_end_of_joining(joining: Joining) -> None:
    code, left, said = joining.finish()
    assert (code, left) == (0, 0), joining.launched.err + said
    assert "the job is over" in said


@pytest.mark.parametrize("joining", [("--min-np", "1", "elastic_steps.py")], indirect=True)
def test_an_elastic_job_goes_on_without_a_machine_that_leaves(joining: Joining, tmp_path: Path) -> None:
    assert joining.launched.process.stdout is not None
    for line in joining.launched.process.stdout:
        if line.startswith(b"[desk:1]") and b"step" in line:
            break
    joining.process.send_signal(signal.SIGINT)
    assert joining.process.wait(LIMIT_S) == 130
    joining.wait_for("desk")
    (tmp_path / "go-on").unlink()
    code, _, said = joining.finish()
    assert code == 0, joining.said + joining.launched.err
    assert "this machine has left the job" in said


def test_a_machine_that_stays_serves_job_after_job_until_it_is_forgotten(tmp_path: Path) -> None:
    port = free_port()
    made = Joining(tmp_path, "train.py", hosts=f"localhost,join:1@{port}", stays=True)
    try:
        assert made.launched.finish(LIMIT_S) == 0, made.launched.err
        for _ in range(2):
            made.launched = made.launch(f"localhost,join:desk@{port}", "train.py")
            assert made.launched.finish(LIMIT_S) == 0, made.launched.err
            assert "[desk:1] sum 3.0 desk None yes True" in made.launched.out
            assert "waiting for desk (ringrun join --stay there)" in made.launched.err
        environ = {**made.environ, "XDG_CONFIG_HOME": str(tmp_path / "configuration")}
        hosts = [sys.executable, "-m", "ringrun", "hosts"]
        shown = subprocess.run(hosts, env=environ, stdout=subprocess.PIPE, text=True).stdout
        assert "Known machines that have joined, for -H join:NAME: desk" in shown
        (launcher,) = (made.home / ".config/ringcomm/launchers").iterdir()
        subprocess.run([*hosts, "forget", launcher.name], env=made.environ, check=True)
        made.launched = made.launch(f"localhost,join:desk@{port}", "train.py")
        with pytest.raises(subprocess.TimeoutExpired):  # it does not come any more
            made.launched.process.wait(8)
        subprocess.run([*hosts, "forget", "desk"], env=environ, check=True, stdout=subprocess.DEVNULL)
        again = made.launch(f"localhost,join:desk@{port}", "train.py")
        assert again.finish(LIMIT_S) == 2 and "No machine desk is known here" in again.err
        made.process.send_signal(signal.SIGINT)
        assert made.process.wait(LIMIT_S) == -signal.SIGINT
    finally:
        made.end()


def test_without_a_terminal_nothing_runs_unless_yes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ringrun", "join", "127.0.0.1:9", "7-lusab-babad-gutih"],
        env={**os.environ, "PYTHONPATH": SOURCES}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2 and "Give --yes" in done.stderr
