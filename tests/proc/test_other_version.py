"""The last release beside this version: refused with both named, or it works (docs/stability.md).

PREVIOUS_WHEEL is a wheel of that release. Otherwise its sources are those of the last tag ``v*`` before this
commit; without one they are this tree's, with another number.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Optional, Tuple

import pytest

from ringcomm.version import __version__
from tests.proc.test_ringrun_support import LIMIT_S, ROOT, Launched
from tests.support.service import free_port

pytestmark = pytest.mark.release

NUMBER = re.compile(r'__version__ = "([^"]+)"')
SUM = "import numpy as np, ringcomm as rc; rc.init(); print(rc.allreduce(np.ones(3), op=rc.Sum).sum())"
STATES = """
import numpy as np, ringcomm as rc
rc.init()
weights = [np.zeros(4, np.float32)]
parts = [rc.elastic.ElasticSampler(100), rc.balanced(100, 10), rc.LocalSGD(weights, sync_every=4)]
"""


class Installed(NamedTuple):
    """One of the two versions, and an interpreter into which it and its needs are installed."""

    version: str
    python: str


def git(*words: str) -> bytes:
    """The output of git in this checkout; nothing where there is no history."""
    if shutil.which("git") is None:
        return b""
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True).stdout


def last_release() -> Optional[str]:
    """The tag of the last release before this commit, or None."""
    return git("describe", "--tags", "--abbrev=0", "--match", "v*", "HEAD~1").decode().strip() or None


def unpack(folder: Path) -> List[Path]:
    """Put the packages of the previous version into a folder; returns the folders to import from."""
    release = last_release()
    if "PREVIOUS_WHEEL" in os.environ:
        zipfile.ZipFile(os.environ["PREVIOUS_WHEEL"]).extractall(folder)
        return [folder]
    if release is not None:
        archive = git("archive", "--format=tar", release, "ringcomm", "launcher")
        with tarfile.open(fileobj=BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
    else:
        for part in ("ringcomm", "launcher"):
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        place = folder / "ringcomm" / "version.py"
        place.write_text(NUMBER.sub('__version__ = "0.0.1"', place.read_text()))
    return [folder, folder / "launcher"]


def install(environment: Path, folders: List[Path]) -> Installed:
    """Make a virtual environment that imports from these folders, and NumPy and the like from this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    (packages,) = (environment / "lib").glob("python*/site-packages")
    paths = [*map(str, folders), sysconfig.get_path("purelib")]
    (packages / "paths.pth").write_text("\n".join([*paths, ""]))
    interpreter = str(environment / "bin" / "python")
    program = "import ringcomm; print(ringcomm.__version__)"
    return Installed(ended(start(interpreter, program)).strip(), interpreter)


@pytest.fixture(scope="module")
def both() -> Iterator[Tuple[Installed, Installed]]:
    """This version and the previous one."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "source").mkdir()
        this = install(Path(name) / "this", [ROOT, ROOT / "launcher"])
        previous = install(Path(name) / "previous", unpack(Path(name) / "source"))
        assert this.version == __version__ != previous.version
        yield this, previous


def start(python: str, program: str, **environment: str) -> subprocess.Popen[str]:
    """Start a program with one of the two."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RINGCOMM_")}
    return subprocess.Popen(
        [python, "-c", program], env={**inherited, "PYTHONPATH": "", **environment}, text=True, cwd="/",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> str:
    """Its output; it ends by itself."""
    try:
        return process.communicate(timeout=LIMIT_S)[0]
    finally:
        process.kill()


def test_ranks_started_by_hand_refuse_the_other_version(both: Tuple[Installed, Installed]) -> None:
    address = f"127.0.0.1:{free_port()}"
    common = {"RINGCOMM_SIZE": "2", "RINGCOMM_RENDEZVOUS": address, "RINGCOMM_KEY": secrets.token_hex(32),
              "RINGCOMM_START_TIMEOUT": "5"}  # fmt: skip
    ranks = [start(each.python, SUM, **common) for each in both]
    text = "".join([ended(rank) for rank in ranks])
    assert [rank.returncode for rank in ranks] == [1, 1], text
    refusal = r"RefusedError: .* has ringcomm (\S+), but this job runs (\S+)\. Install"
    (found,) = set(re.findall(refusal, text))
    assert set(found) == {each.version for each in both}
    assert "Only 1 of 2 ranks" in text  # of the one that serves the rendezvous


@pytest.mark.parametrize("newer", [True, False], ids=["this-starts", "previous-starts"])
def test_hosts_with_the_other_version_get_the_launchers(
    both: Tuple[Installed, Installed], newer: bool, tmp_path: Path
) -> None:
    launcher, host = both if newer else both[::-1]
    (tmp_path / "train.py").write_text(f"{SUM}; print(rc.__version__)")
    arguments = ("-np", "2", "--python", host.python, "train.py")
    job = Launched(*arguments, cwd=tmp_path, env={"PYTHONPATH": ""}, python=launcher.python)
    assert job.finish() == 0, job.err
    assert job.out.count("6.0") == 2 and job.out.count(launcher.version) == 2


@pytest.mark.parametrize("newer", [True, False], ids=["this-stops", "previous-stops"])
def test_ps_and_stop_reach_jobs_of_the_other_version(both: Tuple[Installed, Installed], newer: bool) -> None:
    command, launcher = both if newer else both[::-1]
    with tempfile.TemporaryDirectory(prefix="ringrun-") as runtime:
        environment = {"PYTHONPATH": "", "XDG_RUNTIME_DIR": runtime}
        job = Launched("-np", "2", "sh", "-c", "echo here; sleep 600", env=environment, cwd=Path("/"),
                       python=launcher.python)  # fmt: skip
        try:
            assert job.process.stdout is not None and job.process.stderr is not None
            assert b"here" in job.process.stdout.readline(), job.process.stderr.read()

            def run(*words: str) -> subprocess.CompletedProcess[str]:
                return subprocess.run(
                    [command.python, "-m", "ringrun", *words], text=True, capture_output=True,
                    timeout=LIMIT_S, cwd="/", env={**os.environ, **environment},
                )  # fmt: skip

            listed = run("ps")
            assert str(job.process.pid) in listed.stdout, listed.stderr
            stopped = run("stop", listed.stdout.splitlines()[1].split()[0])
            assert "is being ended" in stopped.stdout, stopped.stderr
            assert job.finish() == 143
        finally:
            job.end()


def test_saved_states_of_the_previous_version_are_loaded(
    both: Tuple[Installed, Installed], tmp_path: Path
) -> None:
    this, previous = both
    file = str(tmp_path / "state")
    saving = (
        f"{STATES}\nimport pickle\nparts[0].load_state_dict({{'epoch': 2, 'processed_num': 30}})\n"
        "weights[0] += 1\nparts[2].step()\n"
        f"pickle.dump([part.state_dict() for part in parts], open({file!r}, 'wb'))"
    )
    loading = (
        f"{STATES}\nimport json, pickle\nsaved = pickle.load(open({file!r}, 'rb'))\n"
        "for part, state in zip(parts, saved): part.load_state_dict(state)\n"
        "now = [part.state_dict() for part in parts]\n"
        "print(json.dumps([saved, now], default=lambda array: array.tolist()))"
    )
    writer = start(previous.python, saving)
    assert ended(writer) == "" and writer.returncode == 0
    saved, now = json.loads(ended(start(this.python, loading)))
    assert saved[0] == {"epoch": 2, "processed_num": 30}
    for before, after in zip(saved, now):
        kept: Dict[str, object] = {name: after.get(name) for name in before}
        assert kept == before
