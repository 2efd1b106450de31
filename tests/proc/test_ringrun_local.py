"""The real launcher on this machine: output, exit codes, messages, root causes, ps, stop, doctor."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Dict, Iterator, List

import pytest

from ringcomm.transport.nics import machine
from ringrun.agent.processes import available_cores
from ringrun.job.control import jobs_of
from tests.proc.test_ringrun_support import LIMIT_S, SOURCES, Launched, ringrun
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


TRAIN = """
import os, signal, sys, time
import numpy as np
import ringcomm as rc

rc.init()
for step in range(100000):
    if step == 5 and rc.rank() == 1:
        if sys.argv[1] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if sys.argv[1] == "raises":
            raise ValueError("its own fault")
        if sys.argv[1] == "leaves":
            sys.exit(0)
        if sys.argv[1] == "frozen":
            os.kill(os.getpid(), signal.SIGSTOP)
    rc.allreduce(np.ones(1000))
"""


@pytest.mark.parametrize(
    ("way", "code", "words"),
    [
        ("killed", 137, ["rank 1 on localhost failed first: killed by SIGKILL"]),
        ("raises", 1, ["rank 1 on localhost failed first: exit code 1", "│ ValueError: its own fault"]),
        ("leaves", 255, ["rank 1 has ended while ranks 0, 2 still wait for it", "exit code 0"]),
        ("frozen", 255, ["rank 1 on localhost held up the others: still running, ended by ringrun with"]),
    ],
)
def test_the_rank_that_failed_first_is_named(tmp_path: Path, way: str, code: int, words: list[str]) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    done = ringrun("-np", "3", "--dead-after", "3", "train.py", way, cwd=tmp_path)
    assert done.process.returncode == code, done.err
    for word in ["Ranks 0, 2 stopped because of it.", *words]:
        assert word in done.err
    assert done.err.count("╭") == 1
    # The other ranks' tracebacks only repeat it, and are not shown.
    assert "PeerLostError" not in done.err and "PeerStalledError" not in done.err


@pytest.mark.parametrize(
    ("act", "words"),
    [
        ("time.sleep(600)", r"has called nothing yet; its main thread is in hang \(train.py:6\)\."),
        ("os.kill(os.getpid(), 19)", r"did not answer: its process is stopped \(SIGSTOP, "),
    ],
)
def test_a_rank_that_hangs_while_it_connects(tmp_path: Path, act: str, words: str) -> None:
    (tmp_path / "train.py").write_text(f"""
import os, time
import ringcomm as rc
from ringcomm.rendezvous.links import LinkSetup
def hang(*_):
    {act}
if os.environ["RINGCOMM_SLOT"] == "0:1":
    LinkSetup.link = hang
rc.init()
""")
    done = ringrun("-np", "3", "--dead-after", "2", "train.py", cwd=tmp_path)
    assert done.process.returncode == 255, done.err
    assert "rank 1 on localhost held up the others: still running" in done.err
    assert "silent for 2 s while links were being built" in done.err
    assert re.search(rf"│ Rank 1 \(localhost\) {words}", done.err), done.err


def test_a_rank_that_has_not_called_init_does_not_hang_in_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("""
import os
import ringcomm as rc
while os.environ["RINGCOMM_SLOT"] == "0:1":
    pass
rc.init()
""")
    done = ringrun("-np", "2", "--start-timeout", "2", "train.py", cwd=tmp_path)
    assert done.process.returncode == 255, done.err
    assert "rank 1 on localhost held up the others" in done.err and "did not answer" not in done.err


def test_verbose_shows_the_links(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import ringcomm as rc\nrc.init()\nprint(rc.rank())\n")
    done = ringrun("-np", "2", "--verbose", "train.py", cwd=tmp_path)
    assert done.process.returncode == 0, done.err
    assert "ringrun: rank 0 runs on localhost as process" in done.err
    assert "rank 0 (localhost)" in done.err and "<->" in done.err
    assert "rank 0 exchanges data through" in done.err


def test_ranks_can_be_bound_to_cores() -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core")
    program = "import os; print(sorted(os.sched_getaffinity(0)))"
    done = ringrun("-np", "2", "-bind-to", "core", "--tag-output", "python", "-c", program)
    assert done.process.returncode == 0, done.err
    rows = [set(json.loads(line.split("] ", 1)[1])) for line in done.out.splitlines()]
    assert len(rows) == 2 and not rows[0] & rows[1]


@pytest.mark.parametrize("name", ["numpy", pytest.param("socket", marks=pytest.mark.release)])
def test_the_file_that_shadows_a_module_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").write_text("x = 1\n")
    (tmp_path / "train.py").write_text("import ringcomm as rc\nrc.init()\n")
    done = ringrun("-np", "1", "train.py", cwd=tmp_path)
    assert done.process.returncode == 1
    assert f"{tmp_path / name}.py has the name of the module {name}, and is" in done.err, done.err
    assert "pip install" not in done.err


def test_the_launcher_itself_imports_nothing_from_the_working_directory(tmp_path: Path) -> None:
    for name in ("numpy", "json", "click", "signal", "ringcomm"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "train.py").write_text("print('ran')\n")
    done = ringrun("-np", "1", "own/train.py", cwd=tmp_path)
    assert done.process.returncode == 0 and "ran" in done.out, done.err


ALONE = "ringrun: no rank called ringcomm.init(): each trained alone"


def test_ranks_that_call_init_and_nothing_else_have_trained_alone(tmp_path: Path) -> None:
    (tmp_path / "inits.py").write_text("import ringcomm\nringcomm.init()\n")
    job = ringrun("-np", "2", "inits.py", cwd=tmp_path)
    assert job.process.returncode == 0 and "every rank called init(), and none made" in job.err, job.err


@pytest.mark.parametrize(("program", "told"), [("plain.py", 1), ("outside.py", 0)])
def test_ranks_that_never_call_init_have_trained_alone(tmp_path: Path, program: str, told: int) -> None:
    (tmp_path / "plain.py").write_text("import ringcomm\n")
    (tmp_path / "inits.py").write_text("import ringcomm\nringcomm.init()\n")
    child = "subprocess.call([sys.executable, 'inits.py'], close_fds=False)"
    (tmp_path / "outside.py").write_text(f"import subprocess, sys\nsys.exit({child})\n")
    job = ringrun("-np", "2", program, cwd=tmp_path)
    assert job.process.returncode == 0 and job.err.count(ALONE) == told, job.err


NUMPY = "import numpy as np, ringcomm as rc\nrc.init()\nrc.allreduce(np.ones(3))\n"
OPTIMIZER = """
import torch
import ringcomm.torch as hvd
hvd.init()
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
model(torch.ones(2, 3)).sum().backward()
optimizer.step()
"""

@pytest.mark.timeout(300)
@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("program", "options", "lines"),
    [
        (NUMPY, ["--compress", "int8", "--local-steps", "auto"],
         ["--compress int8 had no effect: ", "--local-steps auto had no effect: "]),
        (OPTIMIZER, ["--compress", "int8", "--local-steps", "4"], []),
    ],
)  # fmt: skip
def test_an_option_that_no_optimizer_follows(
    tmp_path: Path, program: str, options: List[str], lines: List[str]
) -> None:
    if "torch" in program:
        pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(program)
    done = Launched("-np", "2", *options, "--python", sys.executable, "train.py", cwd=tmp_path)
    done.finish(180.0)
    assert done.process.returncode == 0, done.err
    said = [line for line in done.err.splitlines() if "had no effect" in line]
    assert len(said) == len(lines), done.err
    for line, start in zip(said, lines):
        assert re.match(rf"(ringrun: |\[localhost:0\] ){start}", line), line


# ---- `ringrun ps`, `stop` and `doctor`, as a user calls them -------------------------------------


SLEEP = [sys.executable, "-c", "print('here', flush=True); import time; time.sleep(600)"]


@pytest.fixture
def runtime() -> Iterator[str]:
    """A short path: those of Unix sockets have a limit."""
    with tempfile.TemporaryDirectory(prefix="ringrun-") as name:
        yield name


def command(runtime: str, *words: str) -> subprocess.CompletedProcess[str]:
    environ: Dict[str, str] = {**os.environ, "PYTHONPATH": SOURCES, "XDG_RUNTIME_DIR": runtime}
    return subprocess.run(
        [sys.executable, "-m", "ringrun", *words], env=environ, timeout=LIMIT_S, text=True,
        capture_output=True,
    )  # fmt: skip


def answered(runtime: str, answer: bytes, *words: str) -> int:
    """The exit code of a command whose question is answered on a terminal."""
    own, its = pty.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "ringrun", *words], stdin=its, stdout=its, stderr=its,
            env={**os.environ, "PYTHONPATH": SOURCES, "XDG_RUNTIME_DIR": runtime},
        )  # fmt: skip
        seen = b""
        while b"[y/N]" not in seen:
            seen += os.read(own, 1000)
        os.write(own, answer)
        return process.wait(LIMIT_S)
    finally:
        os.close(own)
        os.close(its)


def started(runtime: str, *words: str) -> Launched:
    job = Launched(*words, env={"XDG_RUNTIME_DIR": runtime})
    assert job.process.stdout is not None and b"here" in job.process.stdout.readline()
    return job


@pytest.mark.full
def test_jobs_are_listed_and_one_is_ended(runtime: str) -> None:
    one, other = started(runtime, "-np", "2", *SLEEP), started(runtime, "-np", "1", *SLEEP)
    listed = command(runtime, "ps").stdout.splitlines()
    assert listed[0].split() == ["JOB", "PID", "RANKS", "RUNS", "FOR", "HOSTS", "PROGRAM"]
    rows = {int(line.split()[1]): line.split() for line in listed[1:]}
    assert set(rows) == {one.process.pid, other.process.pid}
    assert rows[one.process.pid][2] == "2" and rows[one.process.pid][-1] == sys.executable
    done = command(runtime, "stop", rows[one.process.pid][0])
    assert done.returncode == 0 and "is being ended" in done.stdout, done.stderr
    assert one.finish() == 143  # as after SIGTERM; finish() checks that nothing is left
    assert answered(runtime, b"y\n", "stop") == 0
    assert other.finish() == 143
    assert jobs_of(Path(runtime) / "ringrun") == ([], [])


VIA = "env NAME={host}"


def doctor(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "ringrun", "doctor", *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=2 * LIMIT_S, check=False)


def test_two_names_of_this_machine_are_found_out() -> None:
    found = doctor("-H", "a,b", "--via", VIA)
    assert found.returncode == 1, found.stderr
    text = " ".join(found.stdout.split())
    assert "a, b are one machine" in text and "Examined 2 hosts in" in text


def test_everything_as_data() -> None:
    found = json.loads(doctor("-H", "a,b", "--via", VIA, "--json").stdout)
    assert [host["name"] for host in found["hosts"]] == ["a", "b"]
    assert "are one machine" in json.dumps(found["problems"])


def test_an_interface_that_does_not_exist() -> None:
    found = doctor("-H", "a,b", "--via", VIA, "--iface", "b=nosuch0")
    text = " ".join(found.stdout.split())
    assert found.returncode == 1 and "--iface 'nosuch0' matches none of this machine's interfaces" in text
