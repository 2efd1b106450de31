"""What tests of real jobs share: start the real launcher, or ranks without it, and find what is left."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
import weakref
from pathlib import Path
from typing import Dict, List, Mapping, Optional, Sequence, Set, Tuple

from tests.support.service import free_port

ROOT = Path(__file__).resolve().parents[2]
SOURCES = os.pathsep.join([str(ROOT), str(ROOT / "launcher")])
MARK = "RINGRUN_TEST_MARK"
LIMIT_S = 60.0


class Launched:
    """``python -m ringrun …`` in a separate session; all its processes carry a mark."""

    def __init__(
        self, *arguments: str, cwd: Optional[Path] = None, env: Optional[Mapping[str, str]] = None,
        python: str = sys.executable,
    ) -> None:  # fmt: skip
        self.mark = uuid.uuid4().hex
        environ: Dict[str, str] = {k: v for k, v in os.environ.items() if not k.startswith("RINGCOMM_")}
        environ.update({"PYTHONPATH": SOURCES, MARK: self.mark, **(env or {})})
        # flight records, unless an option sets another folder
        self.records = Path(tempfile.mkdtemp(prefix="ringrun-test-"))
        self.temporary = Path(tempfile.mkdtemp(prefix="ringrun-test-"))
        for folder in (self.records, self.temporary):
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        environ.setdefault("RINGCOMM_DIAGNOSE_DIR", str(self.records))
        environ["TMPDIR"] = str(self.temporary)
        self.process = subprocess.Popen(
            [python, "-m", "ringrun", *arguments], cwd=cwd, env=environ, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.out = self.err = ""

    def finish(self, limit_s: float = LIMIT_S) -> int:
        """Wait for its end, check that nothing is left, and return the exit code."""
        try:
            out, err = self.process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate()
            raise AssertionError(
                f"no end after {limit_s} s\n{out!r}\n{err.decode('utf-8', 'replace')}\n{self.others()}"
            ) from None
        finally:
            left = self.wait_for_all_to_end(1.0)
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        self.out = (out or b"").decode("utf-8", "replace")
        self.err = err.decode("utf-8", "replace")
        assert not left, f"left behind: {left}\n{self.err}"
        return self.process.returncode

    def end(self) -> None:
        """Kill what still runs, and close the pipes. Harmless after :meth:`finish`."""
        self.process.kill()
        self.process.wait()
        for pid in self.wait_for_all_to_end(5.0):
            os.kill(pid, signal.SIGKILL)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()

    def pids(self) -> Set[int]:
        """Every living process that carries the mark."""
        wanted = f"{MARK}={self.mark}".encode()
        found = set()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if wanted in (entry / "environ").read_bytes().split(b"\0") and state(entry) != "Z":
                        found.add(int(entry.name))
                except OSError:
                    continue
        return found

    def others(self) -> Dict[int, str]:
        """Their command lines, without the launcher's."""
        return {pid: command_line(pid) for pid in self.pids() if pid != self.process.pid}

    def find(self, word: str, count: int = 1, limit_s: float = LIMIT_S) -> List[int]:
        """Wait until so many processes have a word in their command line."""
        until = time.monotonic() + limit_s
        while True:
            found = sorted(pid for pid, line in self.others().items() if word in line)
            if len(found) >= count:
                return found
            if time.monotonic() > until or self.process.poll() is not None:
                self.process.kill()
                out, err = self.process.communicate()
                raise AssertionError(f"{len(found)} of {count} {word!r} came up\n{out!r}\n{err!r}")
            time.sleep(0.02)

    def wait_for_all_to_end(self, limit_s: float) -> Set[int]:
        """Wait until nothing with the mark is alive; returns what still is."""
        until = time.monotonic() + limit_s
        while True:
            left = self.pids()
            if not left or time.monotonic() > until:
                return left
            time.sleep(0.02)


def state(entry: Path) -> str:
    """The process state letter."""
    return (entry / "stat").read_text().rpartition(")")[2].split()[0]


def command_line(pid: int) -> str:
    """A process's arguments, joined by spaces; "" when it is gone."""
    try:
        return (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
        )
    except OSError:
        return ""


def ringrun(*arguments: str, cwd: Optional[Path] = None, env: Optional[Mapping[str, str]] = None) -> Launched:
    """Run to the end."""
    launched = Launched(*arguments, cwd=cwd, env=env)
    launched.finish()
    return launched


def wait_for_files(paths: Sequence[Path], limit_s: float = LIMIT_S) -> None:
    """Wait until programs under test have made these files."""
    until = time.monotonic() + limit_s
    while not all(path.exists() for path in paths):
        assert time.monotonic() < until, f"never made: {[str(path) for path in paths if not path.exists()]}"
        time.sleep(0.02)


def test_the_mark_is_found() -> None:
    launched = Launched("-np", "2", "sleep", "0.3")
    assert len(launched.find("sleep", 2)) == 2
    assert launched.finish() == 0


def run_plain(program: str, size: int, **environment: str) -> List[Tuple[int, str]]:
    """Run a program on so many ranks of this host, which TEST_NUMBER counts; each exit code and output."""
    port = free_port()
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RINGCOMM_")},
        "PYTHONPATH": SOURCES,
        "RINGCOMM_SIZE": str(size),
        "RINGCOMM_RENDEZVOUS": f"127.0.0.1:{port}",
        "RINGCOMM_KEY": secrets.token_hex(32),
        **environment,
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program], env={**env, "TEST_NUMBER": str(number)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for number in range(size)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, text) for rank, text in zip(ranks, outputs)]
