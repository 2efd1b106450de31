"""How ``init_process_group`` finds the store of a job, and the ranks of a group their rendezvous."""

from __future__ import annotations

import errno
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from ringcomm import api
from ringcomm.config import Membership
from ringcomm.errors import ConfigError, StartTimeoutError, StartupError
from ringcomm.storage.keys import key_text
from ringcomm.torch.distributed import _rendezvous
from ringcomm.torch.distributed._rendezvous import JobEntry, StoreEntry, adopt, group_settings, meet
from tests.support.service import Service, eventually

LIMIT = timedelta(seconds=60)
KEY = b"k" * 32
SHORT = group_settings(timedelta(seconds=1))
LONG = group_settings(timedelta(seconds=60))


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """No launcher has set anything, and nothing of this process's last job is left."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name in ("KEY", "KEY_FD", "KEY_FILE"):
        monkeypatch.delenv(f"RINGCOMM_{name}", raising=False)
    monkeypatch.setattr(_rendezvous, "_job_stores", [])
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


def test_the_address_of_rank_0():
    """As its own links have it for the others, and as another rank's link has it."""

    def context(*ends):
        return SimpleNamespace(size=len(ends), group=SimpleNamespace(addresses=ends.__getitem__))

    inside, one, other, scoped = None, ("10.0.0.1", "10.0.0.2"), ("10.0.1.1", "b"), ("fe80::1%eth0", "c")
    for links, expected in (
        ((inside,), "127.0.0.1"), ((inside, one, one), "10.0.0.1"), ((one, other), ""),
        ((one, scoped), ""), ((scoped,), ""),  # other hosts cannot use it without their own scope
    ):  # fmt: skip
        assert _rendezvous._own_address(context(None, *links)) == expected
    assert _rendezvous._address_of_rank_0(context(one)) == "10.0.0.2"
    assert _rendezvous._address_of_rank_0(context(inside)) == "localhost"


class TestJobs:
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
            assert _rendezvous._job_of(dist.PrefixStore("group", other)) == (service.membership(1), 0)
            assert _rendezvous._job_of(one) is None, "the last one counts"
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
        assert not reader.moved()
        entry(store).write("elsewhere", LONG)
        assert reader.moved() and reader.read(LONG) == "elsewhere"
        store.set("ringcomm/rendezvous", "nonsense")
        assert not reader.moved(), "what rank 0 has not signed is no new entry"
        entry(store, key=b"").write("where it is", LONG)
        assert entry(store, "another group", key=b"").read(LONG) == "where it is", "without a key"

    def test_the_signature_of_another_key_or_group_is_refused(self, store):
        for title, key in (("another group", KEY), ("the group", b"q" * 32), ("the group", b"")):
            entry(store, title, key).write("where it is", LONG)
            with pytest.raises(StartupError, match="of the group .* is not signed with this job's key"):
                entry(store, grace_s=0.0).read(LONG)

    def test_what_is_no_entry_is_refused(self, store):
        nonsense = [b"", b"{", b"[]", b"7", b'{"text": "x"}', b'{"text": "x", "signature": "zz"}',
                    b'{"text": "x", "signature": 7}', b"[" * 100_000, b"\xff\xfe"]  # fmt: skip
        for data in nonsense:
            store.set("ringcomm/rendezvous", data)
            with pytest.raises(StartupError, match="is not signed with this job's key"):
                entry(store, grace_s=0.0).read(LONG)

    def test_it_waits_for_rank_0_to_replace_what_another_process_has_written(self, store):
        store.set("ringcomm/rendezvous", "nonsense")
        timer = threading.Timer(0.05, entry(store).write, ("where it is", LONG))
        timer.start()
        assert entry(store).read(LONG) == "where it is"
        timer.join()

    def test_without_an_entry_the_start_fails(self, store):
        with pytest.raises(StartupError, match="has not opened its rendezvous within 1 s"):
            entry(store).read(SHORT)


def test_every_connection_has_an_entry_of_its_own_at_the_jobs_rendezvous():
    service = Service(2)
    try:
        made = [JobEntry(service.membership(0), "a title", 0) for _ in range(2)]
        assert [item._entry for item in made] == ["a title, turn 0", "a title, turn 1"]
        made[0].write("where it is", LONG)
        assert made[0].read(LONG) == "where it is" and not made[0].moved()
    finally:
        service.server.stop()
    of_a_view = JobEntry(Membership(elastic=True), "a title of this test", 3)
    assert of_a_view._entry == "epoch 3, a title of this test, turn 0"


class TestNotices:
    def test_what_rank_0_could_not_do(self):
        with pytest.raises(StartupError, match="Rank 0 of .* open its rendezvous: no address"):
            _rendezvous._notice_of('{"problem": "no address"}', "the group")

    def test_what_ringcomm_has_not_written(self):
        good = {"endpoints": [["127.0.0.1", 5]], "job": "j", "machine": "m"}
        assert _rendezvous._notice_of(json.dumps(good), "the group") == good
        bad = ["", "[]", "7", '"text"', "[" * 100_000, "null"]
        changes = [{"endpoints": []}, {"endpoints": [["a"]]}, {"endpoints": [["a", "b"]]}, {"endpoints": 7}]
        for change in [*changes, {"job": ""}, {"key": "zz"}, {"key": 7}]:
            bad.append(json.dumps({**good, **change}))
        bad += [json.dumps({key: good[key] for key in good if key != left_out}) for left_out in good]
        for text in bad:
            with pytest.raises(StartupError, match="The entry of the group has not been written by ringcomm"):
                _rendezvous._notice_of(text, "the group")


class TestMeeting:
    def test_encryption_needs_a_certificate(self, store):
        settings = replace(SHORT, encrypt=True)
        for rank in (0, 1):
            with pytest.raises(ConfigError, match="RINGCOMM_ENCRYPT=1 needs a key file with a certificate"):
                meet(store, rank, [0, 1], "test", settings)

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

    def test_the_address_of_another_host_is_preferred(self):
        assert _rendezvous._numeric("192.0.2.7") == ["192.0.2.7"]
        for host in ("", "127.0.0.1", "::1", "a" * 300):
            assert _rendezvous._numeric(host) == []

    def test_the_store_of_a_job_leads_to_the_jobs_rendezvous(self, store, monkeypatch):
        class OneProcess(dict):
            """The connections of each process: the ranks are threads here."""

            def __missing__(self, title):
                return 0

            def __setitem__(self, title, count):
                assert count == 1

        monkeypatch.setattr(_rendezvous, "_connections", OneProcess())
        monkeypatch.setattr(_rendezvous, "_job_stores", [])
        service = Service(2)
        try:
            adopt(store, service.membership(0))
            assert _rendezvous._job_of(dist.HashStore()) is None
            grouped = dist.PrefixStore("group", store)

            def start(rank):
                found = meet(grouped, rank, [0, 1], "test", LONG)
                found.joined.channels.close()
                found.joined.control.leave("the test is over", True)
                found.end(wait=True)
                return len(found.joined.peers), found.embedded is not None

            with ThreadPoolExecutor(2) as pool:
                assert list(pool.map(start, range(2))) == [(2, True), (2, False)]
            assert not store.check(["group/ringcomm/rendezvous"]), "the store has no entry"
        finally:
            service.server.stop()

    def test_an_entry_of_a_group_that_has_ended_is_replaced(self, store, monkeypatch):
        """Rank 1 reads it first; at its address no process listens any more."""
        monkeypatch.setenv("RINGCOMM_KEY", key_text(KEY, ""))
        title = "process group test of ranks 0, 1"
        reading = threading.Event()
        moved = StoreEntry.moved

        def note(asked):
            reading.set()
            return moved(asked)

        monkeypatch.setattr(StoreEntry, "moved", note)
        with socket.socket() as gone, ThreadPoolExecutor(2) as pool:
            gone.bind(("127.0.0.1", 0))  # it does not listen
            notice = {"endpoints": [gone.getsockname()], "job": "ended", "machine": "here"}
            entry(store, title).write(json.dumps(notice), LONG)
            late = pool.submit(meet, store, 1, [0, 1], "test", LONG)
            assert reading.wait(60)
            found = [meet(store, 0, [0, 1], "test", LONG), late.result()]
        for group in found:
            group.joined.channels.close()
            group.joined.control.leave("the test is over", True)
        for group in found:
            group.end()
        assert eventually(
            lambda: _rendezvous._STOP_THREAD_NAME not in [one.name for one in threading.enumerate()]
        )
