"""The entry by which the ranks of a group find their rendezvous: signatures, waits, and what is refused."""

from __future__ import annotations

import errno
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from ringcomm.config import Membership
from ringcomm.errors import ConfigError, StartTimeoutError, StartupError
from ringcomm.storage.keys import key_text
from ringcomm.torch.distributed import _store
from ringcomm.torch.distributed._store import JobEntry, StoreEntry, adopt, group_settings, meet
from tests.support.service import Service, eventually

KEY = b"k" * 32
SHORT = group_settings(timedelta(seconds=1))
LONG = group_settings(timedelta(seconds=60))


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    """The tests' environment gives no key."""
    for name in ("KEY", "KEY_FD", "KEY_FILE"):
        monkeypatch.delenv(f"RINGCOMM_{name}", raising=False)


@pytest.fixture
def store():
    return dist.HashStore()


def entry(store, title="the group", key=KEY, grace_s=60.0):
    return StoreEntry(store, title, key, grace_s)


class TestSettings:
    def test_the_time_limit_of_the_program_counts(self):
        settings = group_settings(timedelta(seconds=20))
        assert (settings.timeout_s, settings.start_timeout_s) == (20.0, 20.0)
        assert group_settings(timedelta(seconds=0.2)).start_timeout_s == 1.0

    def test_pytorchs_own_limit_is_none(self):
        settings = group_settings(timedelta(minutes=30))
        assert (settings.timeout_s, settings.start_timeout_s) == (600.0, 1800.0)


class TestStoreEntries:
    def test_a_signed_entry_is_read(self, store):
        entry(store).write("where it is", LONG)
        reader = entry(store)
        assert reader.read(LONG) == "where it is"
        assert not reader.moved()
        entry(store).write("elsewhere", LONG)
        assert reader.moved() and reader.read(LONG) == "elsewhere"

    def test_without_a_key_any_entry_is_read(self, store):
        entry(store, key=b"").write("where it is", LONG)
        assert entry(store, "another group", key=b"").read(LONG) == "where it is"

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

    def test_another_entry_does_not_count_as_a_new_one_of_rank_0(self, store):
        reader = entry(store)
        entry(store).write("where it is", LONG)
        reader.read(LONG)
        store.set("ringcomm/rendezvous", "nonsense")
        assert not reader.moved()

    def test_it_waits_for_rank_0_to_replace_what_another_process_has_written(self, store):
        store.set("ringcomm/rendezvous", "nonsense")
        timer = threading.Timer(0.05, entry(store).write, ("where it is", LONG))
        timer.start()
        assert entry(store).read(LONG) == "where it is"
        timer.join()

    def test_without_an_entry_the_start_fails(self, store):
        with pytest.raises(StartupError, match="has not opened its rendezvous within 1 s"):
            entry(store).read(SHORT)


class TestJobEntries:
    def test_every_connection_has_an_entry_of_its_own(self):
        first, second = (JobEntry(Membership(), "a title of this test", 0) for _ in range(2))
        assert first._entry == "a title of this test, turn 0"
        assert second._entry == "a title of this test, turn 1"
        assert not first.moved()

    def test_all_ranks_of_the_job_can_read_it(self):
        service = Service(2)
        try:
            made = JobEntry(service.membership(0), "a title of that job", 0)
            made.write("where it is", LONG)
            assert made.read(LONG) == "where it is"
        finally:
            service.server.stop()

    def test_in_an_elastic_job_it_belongs_to_the_view(self):
        made = JobEntry(Membership(elastic=True), "a title of this test", 3)
        assert made._entry == "epoch 3, a title of this test, turn 0"


class TestNotices:
    def test_what_rank_0_could_not_do(self):
        with pytest.raises(StartupError, match="Rank 0 of .* open its rendezvous: no address"):
            _store._notice_of('{"problem": "no address"}', "the group")

    def test_what_ringcomm_has_not_written(self):
        good = {"endpoints": [["127.0.0.1", 5]], "job": "j", "machine": "m"}
        assert _store._notice_of(json.dumps(good), "the group") == good
        bad = ["", "[]", "7", '"text"', "[" * 100_000, "null"]
        changes = [{"endpoints": []}, {"endpoints": [["a"]]}, {"endpoints": [["a", "b"]]}, {"endpoints": 7}]
        for change in [*changes, {"job": ""}, {"key": "zz"}, {"key": 7}]:
            bad.append(json.dumps({**good, **change}))
        bad += [json.dumps({key: good[key] for key in good if key != left_out}) for left_out in good]
        for text in bad:
            with pytest.raises(StartupError, match="The entry of the group has not been written by ringcomm"):
                _store._notice_of(text, "the group")


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

        owner = _store.EmbeddedRendezvous if where == "serve" else _store
        with monkeypatch.context() as full, pytest.raises((OSError, StartupError), match="open files"):
            full.setattr(owner, where, fails)
            meet(store, 0, [0, 1], "test", LONG)
        with pytest.raises(StartupError, match="could not open its rendezvous: .*open files"):
            meet(store, 1, [0, 1], "test", LONG)

    def test_an_error_that_cannot_be_reported_is_raised_all_the_same(self, store, monkeypatch, caplog):
        class Closed:
            def set(self, *_):
                raise RuntimeError("the store is closed")

        with pytest.raises(ConfigError, match="is not a network"):
            meet(Closed(), 0, [0, 1], "test", replace(LONG, iface="eth/0"))
        assert "the store is closed" in caplog.text

    def test_a_rendezvous_that_cannot_be_published_is_closed(self):
        class Closed:
            def set(self, *_):
                raise RuntimeError("the store is closed")

        before = set(threading.enumerate())
        with pytest.raises(RuntimeError, match="the store is closed"):
            meet(Closed(), 0, [0, 1], "test", LONG)
        assert eventually(lambda: set(threading.enumerate()) <= before)

    def test_a_rank_that_does_not_come(self, store):
        before = set(threading.enumerate())
        expected = "1 of 2 ranks have joined within 1 s.*raise the timeout= of init_process_group"
        with pytest.raises(StartTimeoutError, match=expected):
            meet(store, 0, [0, 1], "test", SHORT)
        assert eventually(lambda: set(threading.enumerate()) <= before)

    def test_the_address_of_another_host_is_preferred(self):
        assert _store._numeric("192.0.2.7") == ["192.0.2.7"]
        for host in ("", "127.0.0.1", "::1", "a" * 300):
            assert _store._numeric(host) == []

    def test_the_store_of_a_job_leads_to_the_jobs_rendezvous(self, store, monkeypatch):
        class OneProcess(dict):
            """The connections of each process: the ranks are threads here."""

            def __missing__(self, title):
                return 0

            def __setitem__(self, title, count):
                assert count == 1

        monkeypatch.setattr(_store, "_connections", OneProcess())
        monkeypatch.setattr(_store, "_job_stores", [])
        service = Service(2)
        try:
            adopt(store, service.membership(0))
            assert _store._job_of(dist.HashStore()) is None
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
        assert eventually(lambda: _store._STOP_THREAD_NAME not in [one.name for one in threading.enumerate()])
