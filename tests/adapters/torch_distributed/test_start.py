"""``init()`` within this process: what it finds and refuses; and the warning of ranks that train alone."""

from __future__ import annotations

import sys
import warnings
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch.optim import optimizer as torch_optimizer

import ringcomm as rc
import ringcomm.torch.distributed as backend
from ringcomm.config import Membership
from ringcomm.errors import Misuse, StartupError
from ringcomm.torch.distributed import _group
from ringcomm.torch.distributed._operations import RingcommWork

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def process(monkeypatch):
    """A process of its own: without a launcher, a group or a default backend, before and after."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    backends = dist.Backend.default_device_backend_map
    monkeypatch.setitem(backends, "cpu", backends.get("cpu", "gloo"))
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    rc.shutdown()


class TestInit:
    def test_one_process_is_a_job_of_one(self):
        backend.init()
        group = dist.group.WORLD
        backend.init()
        assert dist.group.WORLD is group
        assert (dist.get_backend(), dist.get_world_size(), backend.local_rank()) == ("ringcomm", 1, 0)
        total = torch.full((3,), 2.0)
        dist.all_reduce(total)
        assert total.tolist() == [2.0] * 3
        backend.monitored_barrier()

    def test_a_group_of_another_backend_is_in_the_way(self):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        for act in (backend.init, backend.local_rank):
            with pytest.raises(Misuse, match="There is a default process group already, .* is 'gloo'"):
                act()

    def test_composer_is_told_where_it_is_imported(self, monkeypatch):
        device = type("DeviceCPU", (), {"dist_backend": "gloo"})
        backend.make_default()
        assert dist.Backend.default_device_backend_map["cpu"] == "ringcomm"
        assert device.dist_backend == "gloo"
        monkeypatch.setitem(sys.modules, "composer.devices.device_cpu", SimpleNamespace(DeviceCPU=device))
        backend.make_default()
        assert device.dist_backend == "ringcomm"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "5"}, "env://"),
        ({}, "ringcomm://"),
        ({"WORLD_SIZE": "1", "MASTER_ADDR": "h"}, "ringcomm://"),
    ],
)
def test_a_launchers_variables_count(monkeypatch, variables, expected):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert _group._init_method() == expected


def test_some_of_them_are_not_enough_unless_there_is_a_job_of_ringcomm(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(StartupError, match="one of 2 processes, but RANK, .* is not set"):
        _group._init_method()
    job = Membership(size=2, rendezvous=(("127.0.0.1", 5),), key=b"k" * 32)
    monkeypatch.setattr(Membership, "from_environment", lambda: job)
    assert _group._init_method() == "ringcomm://"


class TestUnsynchronized:
    """Of two ranks this one is rank 0."""

    @pytest.fixture
    def step(self, monkeypatch):
        """Make a step of an optimizer; afterwards nothing counts steps."""
        monkeypatch.setattr(_group.dist, "get_world_size", lambda: 2)
        monkeypatch.setattr(_group.dist, "get_rank", lambda: 0)
        monkeypatch.setattr(RingcommWork, "any_made", False)
        monkeypatch.setattr(_group.dist, "group", SimpleNamespace(WORLD=torch.ones(1)))
        before = dict(torch_optimizer._global_optimizer_post_hooks)
        yield torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).step
        torch_optimizer._global_optimizer_post_hooks.clear()
        torch_optimizer._global_optimizer_post_hooks.update(before)

    def test_the_tenth_step_warns_once(self, step):
        _group.watch_optimizers()
        for _ in range(9):
            step()
        with pytest.warns(RuntimeWarning, match=r"Rank 0 of 2 has made 10 optimizer step"):
            step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(20):
                step()


def test_an_old_pytorch_is_refused():
    with pytest.raises(ImportError, match=r"needs PyTorch 2\.4 or later; this is 2\.3\.1"):
        backend._check("2.3.1+cpu")
    backend._check("2.10.1+cu128")
