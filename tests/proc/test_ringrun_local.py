"""The real launcher with plain programs on this machine: output, exit codes, messages."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ringcomm.transport.nics import machine
from ringrun.agent.threads import available_cores
from tests.proc.test_ringrun_support import SOURCES, Launched, ringrun
from tests.support.programs import run_python


def test_every_line_says_which_rank_printed_it() -> None:
    done = ringrun("-np", "3", "--threads", "none", "sh", "-c", "echo one; echo two >&2; printf three")
    assert done.process.returncode == 0
    assert sorted(done.out.split("\n")[:-1]) == sorted(
        f"[localhost:{rank}] {word}" for rank in range(3) for word in ("one", "three")
    )
    assert sorted(done.err.split("\n")[:-1]) == [f"[localhost:{rank}] two" for rank in range(3)]


def test_ranks_get_what_they_need_to_join_and_nothing_of_an_outer_job() -> None:
    outer = {"RINGCOMM_RANK": "7", "RINGCOMM_KEY": "ab" * 16, "RINGCOMM_SIZE": "9"}
    outer["RINGCOMM_LATE_AFTER"] = "33"
    done = ringrun("-np", "2", "-x", "EXTRA=1 2", "--iface", "!docker*", "env", env=outer)
    found = {line.split("] ", 1)[1] for line in done.out.splitlines() if line.startswith("[localhost:1]")}
    values = dict(line.split("=", 1) for line in found if "=" in line)
    own = {key: value for key, value in values.items() if key.startswith("RINGCOMM_")}
    assert re.fullmatch(r"127\.0\.0\.1:\d+", own.pop("RINGCOMM_RENDEZVOUS"))
    assert own.pop("RINGCOMM_RENDEZVOUS_MACHINE") == machine()
    assert own.pop("RINGCOMM_MASTER") == f"127.0.0.1,{values['MASTER_PORT']},2"
    assert len(own.pop("RINGCOMM_JOB")) == 16
    assert own.pop("RINGCOMM_KEY_FD").isdigit()
    assert re.fullmatch(r"\d+:\d+,\d+:\d+", own.pop("RINGCOMM_FLIGHT_FD"))
    assert own == {
        "RINGCOMM_SIZE": "2", "RINGCOMM_SLOT": "0:1", "RINGCOMM_HOST": "localhost",
        "RINGCOMM_LATE_AFTER": "33.0", "RINGCOMM_IFACE": "!docker*", "RINGCOMM_RESTART": "0",
        "RINGCOMM_DIAGNOSE_DIR": str(done.records),
    }  # fmt: skip
    assert values["EXTRA"] == "1 2"
    assert values["PYTHONUNBUFFERED"] == "1"


WRAPPED = """
import ringcomm as rc

def forward(stage):
    try:
        raise ValueError('bad weights')
    except ValueError as error:
        raise RuntimeError(f"\\n    [Stage {stage}] failed to run forward:") from error

rc.init()
rc.barrier()
if rc.rank() == 1:
    forward(1)
try:
    rc.barrier()
except rc.PeerLostError as error:
    print(error, flush=True)
    raise
"""


def test_the_cause_of_an_error_is_in_the_box_and_in_the_errors_of_the_others(tmp_path: Path) -> None:
    """A pipeline of PyTorch wraps what a stage raises, in a text that begins with an empty line."""
    (tmp_path / "train.py").write_text(WRAPPED)
    done = ringrun("-np", "2", "train.py", cwd=tmp_path)
    assert done.process.returncode == 1
    assert "│ That was raised because of ValueError: bad weights\n" in done.err
    assert 'train.py", line 6, in forward\n' in done.err.partition("because of ValueError")[2]
    assert "uncaught RuntimeError: [Stage 1] failed to run forward:" in done.out


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ({"ringcomm": "__version__ = '9.9'"}, ["ringcomm 9.9", "pip install"]),
        ({"ringcomm": "raise ImportError('broken here')"},
         ["cannot import ringcomm", "broken here", "pip install"]),
        ({"numpy": "raise ImportError('no numpy')"}, ["cannot import numpy", "pip install numpy"]),
        ({"numpy": "import os; os.kill(os.getpid(), 4)"}, ["trial run", "SIGILL"]),
    ],
    ids=["version", "ringcomm", "numpy", "crash"],
)  # fmt: skip
@pytest.mark.cases(2)
def test_a_host_that_lacks_something_is_told_before_ranks_start(
    tmp_path: Path, package: dict[str, str], words: list[str]
) -> None:
    for name, text in package.items():
        (tmp_path / "job" / name).mkdir(parents=True)
        (tmp_path / "job" / name / "__init__.py").write_text(text)
    (tmp_path / "job" / "train.py").write_text("print('started')")
    done = ringrun("-np", "2", "job/train.py", cwd=tmp_path)
    assert done.process.returncode == 1
    for word in ["localhost: ", *words]:
        assert word in done.err
    assert "started" not in done.out


def _other_python(version: str) -> str:
    found = (
        sorted(Path("/root/.pyenv/versions").glob(f"{version}.*/bin/python"))
        if os.access("/root", os.X_OK)
        else []
    )
    if not found:
        pytest.skip(f"no Python {version} on this machine")
    return str(found[0])


@pytest.mark.cases(1)
@pytest.mark.parametrize("version", ["2.7", "3.6", "3.7"])
def test_an_interpreter_that_is_too_old_says_so(version: str) -> None:
    path = _other_python(version)
    done = ringrun("--python", path, "true")
    assert done.process.returncode == 1
    assert "too old" in done.err
    assert version in done.err and path in done.err and "3.8" in done.err


@pytest.mark.cases(2)
@pytest.mark.parametrize("version", ["3.8", "3.9", "3.12", "3.13"])
def test_the_agent_runs_on_other_interpreters(version: str) -> None:
    done = ringrun("-np", "2", "--python", _other_python(version), "sh", "-c", "echo $RINGCOMM_SLOT")
    assert done.process.returncode == 0, done.err
    assert sorted(done.out.split()) == ["0:0", "0:1", "[localhost:0]", "[localhost:1]"]


@pytest.mark.release
def test_all_output_arrives_however_much_there_is(tmp_path: Path) -> None:
    launched = Launched(
        "-np", "3", "--output-dir", str(tmp_path), "sh", "-c", "yes 0123456789 | head -c 6000000; exit 0"
    )
    time.sleep(1.5)  # no process reads meanwhile: all writers must wait, and no output may be lost
    assert launched.finish() == 0
    for rank in range(3):
        assert (tmp_path / f"rank.{rank}" / "stdout").stat().st_size == 6000000
        assert launched.out.count(f"[localhost:{rank}] ") == -(-6000000 // 11)


def test_a_reader_that_leaves_ends_the_job_quietly() -> None:
    launched = Launched("-np", "2", "--threads=none", "sh", "-c", "while :; do echo y; sleep 0.01; done")
    assert launched.process.stdout is not None
    launched.process.stdout.read(10)
    launched.process.stdout.close()
    launched.process.stdout = None
    launched.finish(10.0)
    assert launched.err == ""
    assert launched.process.returncode == 128 + signal.SIGPIPE


def test_help_imports_neither_a_framework_nor_what_only_a_job_needs() -> None:
    program = (
        "import sys\nfrom ringrun.cli import main\nsys.argv[1:] = ['--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    print('modules', *sys.modules)"
    )
    output = run_python("-c", program)
    modules = output.splitlines()[-1].split()
    assert "--hostfile" in output and modules[0] == "modules"
    heavy = {"torch", "tensorflow", "jax", "psutil", "multiprocessing", "ringrun.job.launch"}
    assert heavy.isdisjoint(modules), heavy.intersection(modules)


def test_a_full_disk_is_no_silent_end() -> None:
    program = "import time; print('x' * 100, flush=True); time.sleep(20)"
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "ringrun", "-np", "2", "python", "-c", program], stdout=full,
            env={**os.environ, "PYTHONPATH": SOURCES}, stderr=subprocess.PIPE, timeout=15,
        )  # fmt: skip
    assert done.returncode == 74
    assert b"cannot be written to stdout: No space left on device." in done.stderr


@pytest.mark.full
def test_ranks_of_one_host_share_its_cores() -> None:
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")
    show = f"echo {' '.join(f'${name}' for name in names)}"
    free = dict.fromkeys(names, "")
    two = ringrun("-np", "2", "sh", "-c", show, env=free)
    share = str(max(1, int(available_cores() / 2)))
    assert set(two.out.splitlines()) == {f"[localhost:{rank}] {' '.join([share] * 4)}" for rank in range(2)}
    assert re.fullmatch(r"ringrun: \d+ threads? per rank on localhost \(.* 2 ranks\)\. --thr.*\n", two.err)
    kept = ringrun("-np", "2", "-x", "OMP_NUM_THREADS=9", "sh", "-c", show, env=free)
    assert "OMP_NUM_THREADS=9 is kept" in kept.err and f"[localhost:1] 9 {share}\n" in kept.out
