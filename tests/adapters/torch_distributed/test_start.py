"""How processes start: ``init()``, the store that ``init_process_group`` finds, and a group's rendezvous."""

from __future__ import annotations

import errno
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

import ringcomm as rc
import ringcomm.torch.distributed as backend
from ringcomm.config import Membership
from ringcomm.errors import ConfigError, Misuse, StartTimeoutError, StartupError
from ringcomm.torch.distributed import _group, _rendezvous
from ringcomm.torch.distributed._rendezvous import StoreEntry, group_settings, meet
from tests.support.service import eventually

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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


def test_an_old_pytorch_is_refused():
    with pytest.raises(ImportError, match=r"needs PyTorch 2\.4 or later; this is 2\.3\.1"):
        backend._check("2.3.1+cpu")
    backend._check("2.10.1+cu128")


# ---- how a group finds its store, and its ranks the rendezvous -----------------------------------


LIMIT = timedelta(seconds=60)
KEY = b"k" * 32
SHORT = group_settings(timedelta(seconds=1))
LONG = group_settings(timedelta(seconds=60))


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """No launcher has set anything, and nothing of this process's last job is left."""
    for name in ("KEY", "KEY_FD", "KEY_FILE"):
        monkeypatch.delenv(f"RINGCOMM_{name}", raising=False)
    monkeypatch.setattr(_rendezvous, "_job_stores", [])
    monkeypatch.setattr(_rendezvous, "_last_view", None)


class TestFallback:
    """What is registered in place of PyTorch's ``env://``."""

    def rendezvous(self, usual, url="env://"):
        return list(_rendezvous._with_fallback(usual)(url, LIMIT))

    def usual(self, url, timeout, **_):
        yield from ("first", "second")

    def test_what_the_launcher_has_set_leads_to_the_jobs_rendezvous(self, monkeypatch):
        variables = {"MASTER_ADDR": "h", "MASTER_PORT": "5", "WORLD_SIZE": "2", "RANK": "1",
                     "RINGCOMM_SIZE": "2", "RINGCOMM_MASTER": "h,5,2"}  # fmt: skip
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        job = Membership(size=2, rendezvous=(("127.0.0.1", 5),), key=b"k" * 32)
        monkeypatch.setattr(Membership, "from_environment", lambda: job)
        asked = []
        monkeypatch.setattr(
            _rendezvous, "_launchers_rendezvous", lambda *args: asked.append(args) or ("store", 1, 2)
        )
        for given in ("", "?rank=1&world_size=2", "?world_size=2"):  # as the launcher's, or none
            assert self.rendezvous(self.usual, "env://" + given) == [("store", 1, 2)], given
        assert asked == [(job, 1, LIMIT)] * 3
        for given in ("?rank=0", "?rank=1&world_size=3", "?rank=1&use_libuv=0"):
            assert self.rendezvous(self.usual, "env://" + given) == ["first", "second"], "the program sets it"


# ---- how the ranks of a group connect ------------------------------------------------------------------


@pytest.fixture
def store():
    return dist.HashStore()


def entry(store, title="the group", key=KEY, grace_s=60.0):
    return StoreEntry(store, title, key, grace_s)


def test_the_time_limit_of_the_program_counts_and_pytorchs_own_does_not():
    for limit, expected in (
        (timedelta(seconds=20), (20.0, 20.0)), (timedelta(seconds=0.2), (0.2, 1.0)),
        (timedelta(minutes=30), (600.0, 1800.0)),
    ):  # fmt: skip
        settings = group_settings(limit)
        assert (settings.timeout_s, settings.start_timeout_s) == expected


class TestStoreEntries:
    def test_a_signed_entry_is_read(self, store):
        entry(store).write("where it is", LONG)
        reader = entry(store)
        assert reader.read(LONG) == "where it is"
        assert not reader.watched.moved()
        entry(store).write("elsewhere", LONG)
        assert reader.watched.moved() and reader.read(LONG) == "elsewhere"
        store.set("ringcomm/rendezvous", "nonsense")
        assert not reader.watched.moved(), "what rank 0 has not signed is no new entry"
        entry(store, key=b"").write("where it is", LONG)
        assert entry(store, "another group", key=b"").read(LONG) == "where it is", "without a key"

    def test_the_signature_of_another_key_or_group_is_refused(self, store):
        for title, key in (("another group", KEY), ("the group", b"q" * 32), ("the group", b"")):
            entry(store, title, key).write("where it is", LONG)
            with pytest.raises(StartupError, match="of the group .* is not signed with this job's key"):
                entry(store, grace_s=0.0).read(LONG)


class TestMeeting:
    @pytest.mark.parametrize(
        ("wrong", "text"), [({"iface": "eth/0"}, "is not a network"), ({"encrypt": True}, "needs a key file")]
    )
    def test_what_keeps_rank_0_from_opening_its_rendezvous_is_reported_to_all(self, store, wrong, text):
        """A wrong setting of rank 0 alone; the others have 60 s."""

        def start(rank):
            settings = replace(LONG, **wrong) if rank == 0 else LONG
            with pytest.raises((ConfigError, StartupError)) as caught:
                meet(store, rank, [0, 1], "test", settings)
            return caught.value

        with ThreadPoolExecutor(2) as pool:
            mine, told = pool.map(start, range(2))
        assert isinstance(mine, ConfigError) and text in str(mine)
        assert f"could not open its rendezvous: {mine}" in str(told)

    @pytest.mark.parametrize("where", ["serve", "join"])
    def test_so_is_an_error_of_rank_0s_system(self, store, monkeypatch, where):
        """Rank 1 comes later, and has 60 s."""

        def fails(*_, **__):
            raise OSError(errno.EMFILE, "Too many open files")

        owner = _rendezvous.EmbeddedRendezvous if where == "serve" else _rendezvous
        with monkeypatch.context() as full, pytest.raises((OSError, StartupError), match="open files"):
            full.setattr(owner, where, fails)
            meet(store, 0, [0, 1], "test", LONG)
        with pytest.raises(StartupError, match="could not open its rendezvous: .*open files"):
            meet(store, 1, [0, 1], "test", LONG)

    def test_a_rank_that_does_not_come(self, store):
        before = set(threading.enumerate())
        expected = "1 of 2 ranks have joined within 1 s.*raise the timeout= of init_process_group"
        with pytest.raises(StartTimeoutError, match=expected):
            meet(store, 0, [0, 1], "test", SHORT)
        assert eventually(lambda: set(threading.enumerate()) <= before)
