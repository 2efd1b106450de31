"""``ringcomm.torch.distributed.init()`` under every launcher, and its warning of ranks that train alone."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.proc.test_ringrun_support import ROOT, Launched
from tests.support.programs import run_python

pytest.importorskip("torch")

pytestmark = pytest.mark.release
PROGRAM = str(Path(__file__).with_name("starts.py"))
LIMIT_S = 90.0
ENVIRON = {"OMP_NUM_THREADS": "1"}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
WARNING = re.compile(r"Rank 0 of 2 has made (\d+) optimizer step")


def under_ringrun(way):
    """What two ranks print on both streams."""
    job = Launched("-np", "2", PROGRAM, way, cwd=ROOT, env=ENVIRON)
    assert job.finish(LIMIT_S) == 0, f"{job.out}\n{job.err}"
    return job.out + job.err


def test_it_joins_under_ringrun():
    found = re.findall(r"rank (\d) of 2 has \[2.0, 2.0, 2.0\]", under_ringrun("joins"))
    assert sorted(found) == ["0", "1"]


def test_the_first_functional_collective_imports_the_compiler_meanwhile():
    found = re.findall(r"rank (\d) has \[2.0, 2.0, 2.0\]", under_ringrun("functional"))
    assert sorted(found) == ["0", "1"]


def test_it_joins_under_torchrun():
    found = re.findall(r"rank (\d) of 2 has \[2.0, 2.0, 2.0\]", run_python(*TORCHRUN, PROGRAM, "joins"))
    assert sorted(found) == ["0", "1"]


def test_one_process_needs_no_launcher():
    assert "rank 0 of 1 has [1.0, 1.0, 1.0]" in run_python(PROGRAM, "joins")


def test_a_group_of_another_backend_is_in_the_way():
    text = run_python(PROGRAM, "gloo")
    assert text.startswith("Misuse There is a default process group already, and its backend is 'gloo'.")


def test_lightnings_own_launcher_needs_make_default():
    variables = {"WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    text = run_python(PROGRAM, "joins", **variables)
    assert text.startswith("StartupError WORLD_SIZE=2 says that")
    assert "but RANK is not set" in text
    assert "make_default()" in text


@pytest.mark.parametrize(("way", "steps"), [("alone", 10), ("briefly", 3)])
def test_ranks_that_train_alone_are_reported_once(way, steps):
    """After some steps, or at the end if there were fewer."""
    text = under_ringrun(way)
    assert WARNING.findall(text) == [str(steps)], text
    assert text.count("has trained") == 2


@pytest.mark.parametrize("way", ["ddp", "late", "messages"])
def test_there_is_no_warning_once_ranks_have_communicated(way):
    text = under_ringrun(way)
    assert text.count("has trained") == 2
    assert "optimizer step" not in text, text


@pytest.mark.skipif(bool(find_spec("lightning")), reason="Lightning is installed")
def test_without_lightning_its_strategies_say_what_to_install():
    with pytest.raises(ImportError, match="-m pip install lightning"):
        import_module("ringcomm.lightning")


def test_one_process_is_not_warned():
    text = run_python(PROGRAM, "alone")
    assert "has trained" in text and "Warning" not in text
