"""Elastic training under the real launcher on this machine: losses, joins, removals, the page's scripts."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Dict, List

import pytest

from tests.proc.test_ringrun_support import ROOT, Launched, ringrun
from tests.support.programs import run_python

PROGRAM = str(ROOT / "tests" / "proc" / "programs" / "elastic_steps.py")
LIMIT_S = 60.0


def starts(out: str) -> Dict[int, List[str]]:
    """By member, its lines at the start of the training function."""
    found: Dict[int, List[str]] = {}
    for member, line in re.findall(r"member (\d+) pid \d+ (epoch .*)", out):
        found.setdefault(int(member), []).append(line)
    return found


def pids(out: str) -> Dict[int, set]:
    """By member, the process ids that it has reported."""
    found: Dict[int, set] = {}
    for member, pid in re.findall(r"member (\d+) pid (\d+)", out):
        found.setdefault(int(member), set()).add(pid)
    return found


def endings(out: str) -> int:
    """How many ranks have ended, all with the same number of steps and the total that belongs to it."""
    found = re.findall(r"ends with (\S+) after (\d+) steps", out)
    assert len(set(found)) == 1 and float(found[0][0]) == int(found[0][1]), found
    return len(found)


def wait_for(path: Path, text: str, job: Launched) -> None:
    """Wait until a file of a running job contains a text."""
    until = time.monotonic() + 100.0
    while not (path.exists() and text in path.read_text()):
        assert job.process.poll() is None and time.monotonic() < until, (job.finish(1.0), job.out, job.err)
        time.sleep(0.02)


def test_a_killed_rank_is_replaced_and_the_others_go_on_in_their_processes(tmp_path: Path) -> None:
    options = ["-np", "3", "--min-np", "2", "--report", str(tmp_path / "page.html")]
    done = ringrun(*options, PROGRAM, env={"DIE": "1:10:kill", "UNTIL": "3"})
    assert done.process.returncode == 0, done.err
    page = (tmp_path / "page.html").read_text()
    assert "Changes of membership" in page and "Failure" not in page
    assert re.search(
        r"^ringrun: rank 1 \(localhost\) lost: killed by SIGKILL; going on with 2 ranks after \d+\.\d s$",
        done.err, re.M,
    )  # fmt: skip
    assert "ringrun: localhost joined again: 3 ranks\n" in done.err
    assert "╭─ ringrun: the ranks changed 2 times" in done.err
    found = starts(done.out)
    assert sorted(found) == [0, 1, 2, 3]
    assert found[0][1] == "epoch 1 rank 0 of 2 from step 10"
    assert found[2][1] == "epoch 1 rank 1 of 2 from step 10"
    assert len(found[3]) == 1
    assert all(len(each) == 1 for each in pids(done.out).values())
    assert endings(done.out) == 3


def test_ranks_choose_the_compression_again_when_one_joins(tmp_path: Path) -> None:
    """The new one has made fewer steps than those that were there."""
    pytest.importorskip("torch")
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:2\n")
    options = ["--min-np", "2", "--host-discovery-script", f"cat {hosts}", "--compress", "auto"]
    program = str(ROOT / "tests" / "proc" / "programs" / "elastic_auto.py")
    done = ringrun(*options, program, env={"HOSTS": str(hosts), "OMP_NUM_THREADS": "1"})
    assert done.process.returncode == 0, done.err
    assert done.err.count("compression=auto chooses") == 2, done.err
    weights = re.findall(r"weights \S+", done.out)
    assert len(weights) == 3 and len(set(weights)) == 1, done.out


@pytest.mark.full
def test_hosts_of_the_script_come_and_go(tmp_path: Path) -> None:
    go_on = tmp_path / "go_on"  # without this file the job ends
    go_on.touch()
    hosts, out = tmp_path / "hosts", tmp_path / "out"
    hosts.write_text("localhost:2\n")
    job = Launched(
        "--min-np", "2", "--max-np", "4", "--host-discovery-script", f"cat {hosts}", "--output-dir", str(out),
        PROGRAM, env={"XDG_RUNTIME_DIR": str(tmp_path), "GO_ON": str(go_on)},
    )  # fmt: skip
    wait_for(out / "rank.0" / "stdout", "of 2 from", job)
    hosts.write_text("localhost:2\n127.0.0.1:2\n8.8.8.8\n")
    wait_for(out / "rank.0" / "stdout", "of 4 from", job)
    hosts.write_text("127.0.0.1:2\n")
    wait_for(out / "rank.2" / "stdout", "of 2 from", job)
    go_on.unlink()
    assert job.finish(LIMIT_S) == 0, job.err
    assert re.search(r"^ringrun: 127.0.0.1 (\(2 ranks\) )?joined: 4 ranks$", job.err, re.M)
    assert "localhost (2 ranks) left: 2 ranks\n" in job.err
    assert job.err.count("8.8.8.8 has a public address, but this job does not encrypt") == 1
    assert " lost: " not in job.err
    assert "Traceback" not in job.err
    assert endings(job.out) == 2
    assert len(starts(job.out)[2]) >= 2


def test_a_public_host_of_the_script_needs_a_decision_about_encryption() -> None:
    done = ringrun("--min-np", "1", "--host-discovery-script", "echo 8.8.8.8", PROGRAM)
    assert done.process.returncode == 1
    assert "failed at its first run: 8.8.8.8 has a public address" in done.err and "--encrypt" in done.err


@pytest.mark.full
def test_hosts_are_added_by_the_name_of_a_list_and_dropped(tmp_path: Path) -> None:
    go_on, out, lists = tmp_path / "go_on", tmp_path / "out", tmp_path / "ringcomm" / "hosts"
    go_on.touch()
    lists.mkdir(parents=True, mode=0o700)
    (lists / "lab").write_text(f"127.0.0.1 slots=2 python={sys.executable}\n")
    env = {"XDG_RUNTIME_DIR": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "GO_ON": str(go_on)}
    job = Launched("--min-np", "1", "-H", "localhost:1", "--output-dir", str(out), PROGRAM, env=env)
    wait_for(out / "rank.0" / "stdout", "of 1 from", job)
    assert "nowhere is no host of this job." in ringrun("drop", "nowhere", env=env).err
    postponed = "localhost leaves when other hosts have joined: --min-np 1"
    assert postponed in ringrun("drop", "localhost", env=env).out
    assert "8.8.8.8 has a public address, but this job does not" in ringrun("add", "8.8.8.8", env=env).err
    assert "127.0.0.1 with 2 slots is being added" in ringrun("add", "lab", env=env).out
    wait_for(out / "rank.2" / "stdout", "of 2 from", job)
    go_on.unlink()
    assert job.finish(LIMIT_S) == 0, job.err
    assert "localhost left: 2 ranks\n" in job.err and endings(job.out) == 2


def test_the_other_hosts_go_on_without_one_that_says_what_it_may_not(tmp_path: Path) -> None:
    python, event = tmp_path / "python", '{"event": "ready", "port": 1, "limits": {}}'
    python.write_text(
        f"#!{sys.executable}\nimport os, struct\ndata = b'{event}'\n"
        "os.write(1, b'\\nringrun-agent/1\\n' + struct.pack('!BiI', 4, -1, len(data)) + data + b'\\n')\n"
        "while os.read(0, 65536):\n    pass\n"
    )
    python.chmod(0o755)
    hosts = ["-H", "localhost:2,other:1", "--via", "env AT={host}", "--python", f"other={python}"]
    done = ringrun("-np", "2", "--min-np", "1", *hosts, PROGRAM)
    assert done.process.returncode == 0 and endings(done.out) == 2, done.err
    assert "other: its agent sent invalid data: an invalid event: " in done.err


def test_the_box_of_a_job_whose_ranks_all_fail_has_the_traceback(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise ValueError('broken')\n")
    done = ringrun("-np", "2", "--min-np", "1", "train.py", cwd=tmp_path)
    assert done.process.returncode == 1 and "│ ValueError: broken" in done.err, done.err
    assert "one or more processes exited with non-zero status" in done.err.replace("\n│ ", " "), done.err


EXAMPLE = ROOT / "examples" / "elastic_numpy.py"


def test_the_page_shows_the_example() -> None:
    page = (ROOT / "docs" / "elastic.md").read_text()
    (block,) = re.findall(r"```python\n(# elastic_numpy.py\n.*?)```", page, re.S)
    assert block == EXAMPLE.read_text()


def test_the_example_learns_the_same_although_its_ranks_are_killed(tmp_path: Path) -> None:
    """Ten times as many steps, so that there is time; two of three ranks are killed, rank 0 first."""
    script = tmp_path / "elastic_numpy.py"
    script.write_text(EXAMPLE.read_text().replace("STEPS, GLOBAL_BATCH = 300", "STEPS, GLOBAL_BATCH = 3000"))
    out = tmp_path / "out"
    job = Launched(
        "-np", "3", "--min-np", "2", "--max-np", "3", "--output-dir", str(out), str(script),
        env={"XDG_RUNTIME_DIR": str(tmp_path), "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    for member, victim in ((0, 0), (3, 1)):
        wait_for(out / f"rank.{member}" / "stdout", "of 3 begins", job)
        os.kill(process_of(job, victim), signal.SIGKILL)
    assert job.finish(120.0) == 0, job.err
    assert "rank 0 (localhost) lost: killed by SIGKILL; going on with 2 ranks" in job.err
    assert job.err.count("killed by SIGKILL; going on") == 4, "two lines, and two in the box"
    errors = re.findall(r"rank \d: largest error of a weight (\S+)", job.out)
    assert len(errors) >= 2 and len(set(errors)) == 1 and float(errors[0]) < 1e-6


@pytest.mark.full
@pytest.mark.timeout(240)
@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")
def test_the_example_with_pytorch_goes_on_and_continues_from_its_checkpoint(tmp_path: Path) -> None:
    script, saved, out = str(ROOT / "examples" / "elastic_torch.py"), tmp_path / "model.pt", tmp_path / "out"
    job = Launched(
        "-np", "3", "--min-np", "2", "--max-np", "3", "--output-dir", str(out), script, "--epochs", "20",
        "--checkpoint", str(saved), env={"XDG_RUNTIME_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    wait_for(out / "rank.0" / "stdout", "epoch 1 is done", job)
    os.kill(process_of(job, 0), signal.SIGKILL)
    assert job.finish(100.0) == 0, job.err
    assert "rank 0 (localhost) lost: killed by SIGKILL; going on with 2 ranks" in job.err
    done = [int(epoch) for epoch in re.findall(r"epoch (\d+) is done", job.out)]
    assert sorted(set(done)) == list(range(1, 21)), job.out
    printed = run_python(script, "--epochs", "21", "--checkpoint", str(saved), OMP_NUM_THREADS="1")
    assert "continues after epoch 20" in printed and "epoch 21 is done" in printed
    (reached,) = re.findall(r"1 process\(es\) have reached ([\d.]+)", printed)
    assert float(reached) > 0.85


def process_of(job: Launched, member: int) -> int:
    """The process id of a member of the job."""
    for pid in job.pids():
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if b"RINGCOMM_MEMBER=%d" % member in environ:
            return pid
    raise AssertionError(f"there is no member {member}")
