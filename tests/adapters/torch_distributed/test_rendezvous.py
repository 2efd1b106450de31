"""How ``init_process_group`` finds the store of a job, and at which address."""

from __future__ import annotations

import importlib
import socket
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

import ringcomm as rc
from ringcomm import api
from ringcomm.config import Membership
from ringcomm.group.group import Group
from ringcomm.torch.distributed import _rendezvous, _store
from tests.support.service import Service

LIMIT = timedelta(seconds=60)


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """No launcher has set anything, and nothing of this process's last job is left."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(_store, "_job_stores", [])
    monkeypatch.setattr(_rendezvous, "_last_view", None)


def works(one, other):
    """Whether two ends of a store have the same entries."""
    one.set("key", "value")
    return other.get("key") == b"value"


class TestStores:
    def test_it_listens_on_one_address(self):
        store, where = _rendezvous._serve_store("127.0.0.1", 2, LIMIT)
        assert where[0] == "127.0.0.1" and where[1] > 0
        assert works(store, _rendezvous._reach_store(where, "nowhere.invalid", 2, LIMIT))

    def test_where_that_cannot_be_the_others_must_find_the_address(self):
        for address in ("", "192.0.2.1"):  # not one of this machine's
            store, (host, port) = _rendezvous._serve_store(address, 2, LIMIT)
            assert host == ""
            assert works(store, _rendezvous._reach_store((host, port), "127.0.0.1", 2, LIMIT))


class Links:
    """A context of which only the sockets of the direct links exist."""

    def __init__(self, *socks):
        links = {peer: SimpleNamespace(sock=sock) for peer, sock in enumerate(socks)}
        self.size = len(links)
        channels = SimpleNamespace(direct=SimpleNamespace(link=links.__getitem__))
        self.group = SimpleNamespace(addresses=partial(Group.addresses, SimpleNamespace(channels=channels)))


@pytest.fixture
def connected():
    """Connects sockets: ``connected(address)`` over TCP, ``connected("")`` within the machine."""
    with ExitStack() as stack:

        def connect(address):
            if not address:
                one, other = socket.socketpair()
                stack.callback(other.close)
            else:
                listener = stack.enter_context(socket.create_server((address, 0)))
                one = socket.create_connection(listener.getsockname(), source_address=(address, 0))
            stack.callback(one.close)
            return one

        yield connect


class Scoped:
    """A socket with a link-local address, which other hosts cannot use without their own scope."""

    family = socket.AF_INET6

    def getsockname(self):
        return ("fe80::1%eth0", 5, 0, 2)

    getpeername = getsockname


class TestAddresses:
    def test_of_rank_0_as_its_links_have_it(self, connected):
        inside, one, again = connected(""), connected("127.0.0.1"), connected("127.0.0.1")
        for socks, expected in (
            ((None, inside), "127.0.0.1"),
            ((None, None), "127.0.0.1"),  # a link without a socket is one within this machine
            ((None, inside, one, again), "127.0.0.1"),
            ((None, one, connected("127.0.0.2")), ""),
            ((None, one, Scoped()), ""),
            ((None, Scoped()), ""),
        ):
            assert _rendezvous._own_address(Links(*socks)) == expected

    def test_of_rank_0_as_another_rank_has_it(self, connected):
        for sock, expected in (
            (connected("127.0.0.2"), "127.0.0.2"), (connected(""), "localhost"), (None, "localhost"),
        ):  # fmt: skip
            assert _rendezvous._address_of_rank_0(Links(sock)) == expected


class TestJobs:
    def test_one_process_needs_no_store_of_others(self):
        try:
            ((store, rank, size),) = _rendezvous.ringcomm_rendezvous("ringcomm://")
            assert isinstance(store, dist.HashStore) and (rank, size) == (0, 1)
            assert rc.is_initialized()
        finally:
            rc.shutdown()

    @pytest.mark.parametrize("transport", ["tcp", "memory"])
    def test_the_ranks_of_a_job_find_the_store_over_their_links(self, transport, ranks_of, monkeypatch):
        monkeypatch.setattr(api, "init", lambda: None)

        def find(context):
            ((store, rank, size),) = _rendezvous.ringcomm_rendezvous("ringcomm://", LIMIT)
            assert (rank, size) == (context.rank, context.size)
            store.set(f"rank {rank}", str(rank))
            found = [store.get(f"rank {peer}") for peer in range(size)]
            context.barrier()  # rank 0 serves the store
            return found

        assert ranks_of(3, find, transport=transport) == [[b"0", b"1", b"2"]] * 3

    def test_ranks_without_links_find_it_at_the_jobs_rendezvous(self, monkeypatch):
        for name, value in (("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")):
            monkeypatch.setenv(name, value)
        service = Service(2)
        try:
            found = []
            for rank in range(2):  # as in two processes
                monkeypatch.setattr(_rendezvous, "_stores_made", 0)
                found.append(_rendezvous._launchers_rendezvous(service.membership(rank), rank, LIMIT))
            (one, *facts), (other, *more) = found
            assert (facts, more) == ([0, 2], [1, 2]) and works(one, other)
            assert _store._job_of(dist.PrefixStore("group", other)) == (service.membership(1), 0)
            assert _store._job_of(one) is None, "the last one counts"
        finally:
            service.server.stop()

    def test_in_an_elastic_job_a_second_group_begins_a_new_view(self, monkeypatch):
        class View:
            is_elastic = True

        views = [View()]
        monkeypatch.setattr(api, "init", lambda: None)
        monkeypatch.setattr(api, "context", lambda: views[-1])
        monkeypatch.setattr(api, "restart", lambda: views.append(View()))
        assert _rendezvous._view() is views[0]
        assert _rendezvous._view() is views[1]
        views.append(View())  # elastic.run has begun one already
        assert _rendezvous._view() is views[2] and len(views) == 3


class TestFallback:
    """What is registered in place of PyTorch's ``env://``."""

    def rendezvous(self, usual, url="env://"):
        return list(_rendezvous._with_fallback(usual)(url, LIMIT))

    def usual(self, url, timeout, **_):
        yield from ("first", "second")

    def unset(self, url, timeout, **_):
        raise ValueError("RANK is not set")
        yield

    def test_pytorchs_own_counts_where_its_variables_are_set(self):
        assert self.rendezvous(self.usual) == ["first", "second"]

    def test_a_process_that_is_in_no_job_gets_pytorchs_error(self):
        with pytest.raises(ValueError, match="RANK is not set"):
            self.rendezvous(self.unset)

    def test_in_a_job_nothing_needs_to_be_set(self, monkeypatch):
        job = Membership(size=2, rendezvous=(("127.0.0.1", 5),), key=b"k" * 32)
        monkeypatch.setattr(Membership, "from_environment", lambda: job)
        monkeypatch.setattr(_rendezvous, "ringcomm_rendezvous", lambda url, timeout: iter([("store", 1, 2)]))
        assert self.rendezvous(self.unset) == [("store", 1, 2)]

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

    def test_it_is_registered_where_pytorch_has_env(self, monkeypatch):
        module = importlib.import_module("torch.distributed.rendezvous")
        for handlers in ({}, {"env": self.usual}):
            monkeypatch.setattr(module, "_rendezvous_handlers", handlers)
            _rendezvous.register()
            assert handlers["ringcomm"] is _rendezvous.ringcomm_rendezvous
        assert list(handlers["env"]("env://", LIMIT)) == ["first", "second"]
