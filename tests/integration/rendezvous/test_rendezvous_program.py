"""``python -m ringcomm.rendezvous``: the rendezvous of a job in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringcomm.rendezvous.__main__ import main
from tests.support.service import free_port

ROOT = Path(__file__).resolve().parents[3]


PROGRAM = """
import numpy as np, ringcomm as rc, sys
rc.init()
total = rc.allreduce(np.full(4, float(rc.rank())), op=rc.Sum)
if len(sys.argv) > 1 and rc.rank() == 1:
    raise ValueError("boom")
total = rc.allreduce(total, op=rc.Max)
print("result", rc.rank(), total[0])
"""


def spawn(*arguments, **variables):
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RINGCOMM_")}
    environ.update(PYTHONPATH=str(ROOT), **variables)
    return subprocess.Popen(
        [sys.executable, *arguments], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture
def served(tmp_path, no_leaks):
    """``python -m ringcomm.rendezvous`` for two ranks, and how to start those."""
    key = tmp_path / "key"
    key.write_text("5a" * 32)
    key.chmod(0o600)
    variables = {
        "RINGCOMM_RENDEZVOUS": f"127.0.0.1:{free_port()}", "RINGCOMM_SIZE": "2",
        "RINGCOMM_KEY_FILE": str(key), "RINGCOMM_START_TIMEOUT": "30",
    }  # fmt: skip
    processes = []

    def start(*arguments, **more):
        processes.append(spawn(*arguments, **variables, **more))
        return processes[-1]

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_rendezvous_as_a_program(served):
    server = served("-m", "ringcomm.rendezvous")
    assert server.stdout.readline().startswith("rendezvous of 2 ranks at 127.0.0.1:")
    ranks = [served("-c", PROGRAM, RINGCOMM_RANK=str(rank)) for rank in range(2)]
    for rank, process in enumerate(ranks):
        output, problems = process.communicate(timeout=60)
        assert (process.returncode, output) == (0, f"result {rank} 1.0\n"), problems
    output, problems = server.communicate(timeout=60)
    assert server.returncode == 0, output + problems
    assert problems == ""
    assert output.splitlines()[-1] == "ended: every rank has left"


def run_main(monkeypatch, *arguments, **variables):
    """Its exit code, in this process."""
    for name in [name for name in os.environ if name.startswith("RINGCOMM_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["rendezvous", *arguments])
    try:
        return main()
    except SystemExit as end:
        return end.code


def test_rendezvous_as_a_program_when_a_rank_fails(served):
    server = served("-m", "ringcomm.rendezvous")
    assert server.stdout.readline().startswith("rendezvous of 2 ranks at 127.0.0.1:")
    ranks = [served("-c", PROGRAM, "fail", RINGCOMM_RANK=str(rank)) for rank in range(2)]
    problems = [process.communicate(timeout=60)[1] for process in ranks]
    assert "ValueError: boom" in problems[1]
    assert ranks[0].returncode == 1
    assert "ringcomm.errors.PeerLostError: rank 1 (" in problems[0] and "boom" in problems[0]
    output, _ = server.communicate(timeout=60)
    assert server.returncode == 1
    assert "failed: rank 1 (" in output


@pytest.mark.parametrize(
    "variables, words",
    [
        ({"RINGCOMM_SIZE": "2"}, "RINGCOMM_RENDEZVOUS, the address"),
        ({"RINGCOMM_SIZE": "2", "RINGCOMM_RENDEZVOUS": "127.0.0.1:5000"}, "No key for this job"),
        (
            {"RINGCOMM_SIZE": "2", "RINGCOMM_RENDEZVOUS": "192.0.2.1:5000", "RINGCOMM_KEY": "ab" * 16},
            "cannot listen anywhere: 192.0.2.1",
        ),
    ],
)
def test_nonsense_is_one_clear_line(monkeypatch, capsys, variables, words):
    assert run_main(monkeypatch, **variables) == 2
    output, problems = capsys.readouterr()
    assert output == "" and words in problems
