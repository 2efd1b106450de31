"""``ringrun --horovod``: what scripts find that were written for Horovod."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from tests.proc.test_ringrun_ssh import Sshd, sshd, start
from tests.proc.test_ringrun_ssh import pytestmark as needs_ssh
from tests.proc.test_ringrun_support import ROOT, Launched, ringrun

__all__ = ["sshd"]  # a fixture
SHIM = ROOT / "launcher" / "ringrun" / "compat" / "horovod_shim" / "horovod"

IDENTITY = """
import os

for name in ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"):
    assert os.environ[f"HOROVOD_{name.upper()}"] == str(getattr(rc, name)()), name
for name, other in (("RANK", "rank"), ("WORLD_SIZE", "size"), ("LOCAL_RANK", "local_rank")):
    assert os.environ[name] == str(getattr(rc, other)()), name
assert os.environ["HOROVOD_CONTROLLER"] == os.environ["HOROVOD_CPU_OPERATIONS"] == "gloo"
print(os.environ["HOROVOD_HOSTNAME"], os.environ["MASTER_ADDR"], os.environ["LOCAL_WORLD_SIZE"])
"""

COMMON = """
import horovod
from horovod.common.util import is_version_greater_equal_than
from horovod.common.basics import HorovodBasics
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.common.process_sets import ProcessSet, add_process_set, global_process_set
from horovod.runner.util.threads import in_thread
import ringcomm as rc

assert horovod.__version__.split(".")[0] == "0"
assert HorovodInternalError is rc.HorovodInternalError and HostsUpdatedInterrupt(True).skip_sync
hvd = HorovodBasics(__file__, "mpi_lib_v2")
hvd.init(process_sets=[[0], [1]])
assert (hvd.rank(), hvd.size(), hvd.is_initialized()) == (rc.rank(), 2, True)
assert hvd.gloo_built() and hvd.gloo_enabled() and not hvd.mpi_enabled() and hvd.nccl_built() == 0
assert global_process_set.ranks == [0, 1] and hvd.Sum == rc.Sum
assert is_version_greater_equal_than("2.10.1+cpu", "2.9.0")  # imported by Horovod's own tests
found = []
in_thread(found.append, (1,)).join()
assert found == [1]
"""

FORWARD = """
import sys, types
import horovod
from horovod import _forward

_forward.TARGETS.update({"torch": ("adapter",), "keras": ("no_such",), "mxnet": ("lacking",)})
import horovod.torch as hvd
import horovod.torch.elastic
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.mpi_ops import rank
from horovod.torch import elastic
import adapter

assert hvd is adapter and elastic is adapter.elastic is horovod.torch.elastic
assert sys.modules["adapter.elastic"] is elastic and adapter.__spec__.name == "adapter" == adapter.__name__
assert rank() == 7 and ElasticSampler == 1
for name in ("torch.nope", "keras", "nope", "mxnet", "common.nope", "torch.elastic.nope"):
    try:
        __import__("horovod." + name)
    except ImportError as problem:
        print(f"{name}: {type(problem).__name__}: {problem}")
"""


def test_what_all_of_horovods_bindings_share_and_variables_that_say_what_ringcomm_says(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(COMMON + IDENTITY)
    outer = {"HOROVOD_RANK": "8", "HOROVOD_SIZE": "9", "RANK": "7", "MASTER_ADDR": "elsewhere"}
    done = ringrun("--horovod", "-np", "2", "train.py", cwd=tmp_path, env=outer)
    assert done.process.returncode == 0, done.err
    lines = [f"[localhost:{rank}] localhost 127.0.0.1 2" for rank in range(2)]
    assert sorted(done.out.splitlines()) == lines


def test_modules_are_the_adapters_themselves(tmp_path: Path) -> None:
    for name, text in {
        "adapter/__init__.py": "def rank(): return 7\n",
        "adapter/elastic.py": "ElasticSampler = 1\n",
        "lacking.py": "import no_such_framework.core\n",
        "train.py": FORWARD,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    done = ringrun("--horovod", "-np", "1", "train.py", cwd=tmp_path)
    assert done.process.returncode == 0, done.err
    lines = [line.partition(" ")[2] for line in done.out.splitlines()]
    assert len(lines) == 6
    assert lines[0].startswith("torch.nope: ModuleNotFoundError: horovod.torch.nope has no counterpart")
    assert lines[1].startswith("keras: ModuleNotFoundError: horovod.keras cannot be imported: ringcomm")
    assert "horovod.nope has no counterpart in ringcomm. There are: horovod.common, " in lines[2]
    assert "horovod.torch" in lines[2] and "horovod.keras" not in lines[2]
    assert lines[3].startswith("mxnet: ImportError: horovod.mxnet needs MXNet, but")
    assert f"{sys.executable} -m pip install no_such_framework" in lines[3]
    assert lines[4] == "common.nope: ModuleNotFoundError: No module named 'horovod.common.nope'"
    assert "'horovod.torch.elastic' is not a package" in lines[5]


SETTINGS = """
import os

rank = int(os.environ["HOROVOD_RANK"])
os.environ["HOROVOD_TIMELINE"] = "by_program.json"
os.environ["HOROVOD_FUSION_THRESHOLD"] = "2048"
import horovod.common.process_sets
import ringcomm as rc

os.environ["HOROVOD_START_TIMEOUT"] = "70"
rc.init()
rc.allreduce_async([1.0], name="shown").wait()
found = rc.config.Settings.from_environment()
print(found.fusion_bytes, found.start_timeout_s, found.dead_after_s, found.late_after_s)
"""


def test_variables_that_the_program_sets_count(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SETTINGS)
    given = {"HOROVOD_START_TIMEOUT": "90", "HOROVOD_CYCLE_TIME": "33", "RINGCOMM_DEAD_AFTER": "44"}
    options = ["--horovod", "-np", "2", "--fusion-threshold-mb", "3", "-x", "HOROVOD_TIMELINE=by_option.json"]
    done = ringrun(*options, "--late-after", "55", "train.py", cwd=tmp_path, env=given)
    assert done.process.returncode == 0, done.err
    # ringrun's own settings keep their priority: RINGCOMM_* before HOROVOD_*, and options before both.
    shown = [f"[localhost:{rank}] 2048 70.0 44.0 55.0" for rank in range(2)]
    assert sorted(done.out.splitlines()) == shown
    assert done.err.count("HOROVOD_CYCLE_TIME has no effect") == 1
    assert "shown" in (tmp_path / "by_program.json").read_text()
    assert not (tmp_path / "by_option.json").exists()


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")
def test_torch_distributed_finds_its_meeting_point(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.ones(1)\n"
        "dist.all_reduce(x)\n"
        "print(dist.get_rank(), x.item())\n"
        "dist.destroy_process_group()\n"
    )
    done = Launched("-np", "2", "train.py", cwd=tmp_path)
    assert done.finish(90) == 0, done.err
    assert sorted(done.out.splitlines()) == [f"[localhost:{rank}] {rank} 2.0" for rank in range(2)]


@pytest.mark.cases(5)
@pytest.mark.parametrize("module", ["torch", "tensorflow", "tensorflow.keras", "keras", "mxnet"])
def test_the_adapters_of_this_version(tmp_path: Path, module: str) -> None:
    top = module.partition(".")[0]
    if not importlib.util.find_spec(f"ringcomm.{top}") or not importlib.util.find_spec(top):
        pytest.skip(f"no adapter for {module}, or it is not installed")
    (tmp_path / "train.py").write_text(
        f"import horovod.{module} as hvd, ringcomm.{module}\n"
        f"assert hvd is ringcomm.{module}\nhvd.init()\nprint(hvd.rank(), hvd.size())\n"
    )
    done = Launched("--horovod", "-np", "2", "train.py", cwd=tmp_path)
    assert done.finish(90) == 0, done.err
    assert sorted(done.out.splitlines()) == ["[localhost:0] 0 2", "[localhost:1] 1 2"]


class TestElsewhere:
    """On other hosts the package is found in what ringrun has sent there."""

    pytestmark = needs_ssh

    def test_ssh(self, sshd: Sshd, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text(
            "import os, horovod\n"
            "print(horovod.__file__, *(os.environ[name] for name in ('HOROVOD_RANK', 'HOROVOD_CROSS_RANK',\n"
            "      'HOROVOD_HOSTNAME', 'MASTER_ADDR')))\n"
        )
        done = start(sshd, "jetson1,localhost", "train.py", cwd=tmp_path, options=("--horovod",))
        assert done.finish() == 0, done.err
        first, second = sorted(done.out.splitlines())
        sent = "/ringrun/compat/horovod_shim/horovod/__init__.py 0 0 jetson1 jetson1"
        assert first.startswith("[jetson1:0] /") and first.endswith(sent) and str(SHIM) not in first
        assert second == f"[localhost:1] {SHIM / '__init__.py'} 1 1 localhost jetson1"
