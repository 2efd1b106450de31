"""A context from its start to its end: what it says of the job, and what is left when it fails."""

from __future__ import annotations

import logging
import secrets
import threading

import pytest

from ringcomm.config import Membership, Settings
from ringcomm.errors import StartTimeoutError, StartupError
from ringcomm.group import group as group_module
from ringcomm.group.view import Peer
from ringcomm.job.context import Context
from ringcomm.job.context import _Entry as Entry
from ringcomm.rendezvous.client import join
from ringcomm.rendezvous.embedded import EmbeddedRendezvous
from ringcomm.testing.cluster import run_ranks
from tests.support.service import together

LIMIT_S = 60.0
SETTINGS = Settings(spin_us=0.0, timeout_s=20.0, start_timeout_s=20.0)


def peers(size):
    return [Peer(rank, f"host{rank}", rank, 0, 1) for rank in range(size)]


def test_where_ranks_are():
    def work(context):
        return context.local_size, context.cross_rank, context.cross_size, context.is_homogeneous

    assert run_ranks(4, work, ranks_per_host=2) == [(2, host, 2, True) for host in (0, 0, 1, 1)]
    # The second host has one rank only.
    assert run_ranks(3, work, ranks_per_host=2) == [(2, 0, 2, False), (2, 0, 1, False), (1, 1, 2, False)]


class TestAlone:
    def test_advice_that_was_not_given_is_pointed_out(self, caplog):
        with Context.start(Membership(), Settings(advise=True)):
            pass
        assert any(record.getMessage().startswith("No advice: ") for record in caplog.records)


@pytest.mark.parametrize("ok", [True, False])
def test_the_rank_that_serves_the_rendezvous_stops_it_at_its_end(ok, monkeypatch, no_leaks):
    key, stopped = secrets.token_bytes(32), []
    embedded, endpoints = EmbeddedRendezvous.serve(key, "", "job", 2, SETTINGS)
    stop = embedded.stop
    monkeypatch.setattr(embedded, "stop", lambda failed: stopped.append(failed) or stop(failed))

    def start(rank):
        membership = Membership(2, tuple(endpoints), key, "job", None, rank, "desk")
        joined = join(membership, SETTINGS)
        return Context._of(Entry(joined, membership, embedded if rank == 0 else None), SETTINGS)

    contexts = together([0, 1], start)
    together(contexts, lambda context: context.barrier())
    together(contexts, lambda context: context.close("its program ended", ok))
    assert stopped == [not ok]


class TestFailures:

    def test_one_that_cannot_be_made_leaves_the_job(self, service, monkeypatch):
        made = service(2)
        both = threading.Barrier(2)  # so that neither loses the other before

        def broken(*arguments):
            both.wait(LIMIT_S)
            raise MemoryError("no room for the flight recorder")

        monkeypatch.setattr(group_module, "FlightRecorder", broken)
        found = together([0, 1], lambda rank: error_of(lambda: made.start(rank)))
        assert [type(error) for error in found] == [StartupError] * 2
        assert all("memory is used up" in str(error) for error in found), found

    def test_ranks_that_do_not_come_leave_no_rendezvous_behind(self, no_leaks):
        """Rank 0 serves it, in its own process."""
        membership = Membership(2, (("127.0.0.1", 0),), secrets.token_bytes(32), "job", None, 0, "desk")
        with pytest.raises(StartTimeoutError):
            Context.start(membership, Settings(start_timeout_s=0.3))

def error_of(call):
    try:
        call().close()
    except BaseException as error:  # noqa: BLE001 - looked at by the test
        return error
    return None


def test_misspelt_settings_are_pointed_out(monkeypatch, caplog):
    monkeypatch.setenv("RINGCOMM_TRANSPROT", "tcp")
    monkeypatch.setenv("RINGCOMM_TRANSPORT", "tcp")
    with caplog.at_level(logging.WARNING, "ringcomm"), Context.start(Membership(), Settings()):
        pass
    (line,) = [item.getMessage() for item in caplog.records if "TRANSPROT" in item.getMessage()]
    assert "did you mean RINGCOMM_TRANSPORT?" in line
    assert not any(item.getMessage().startswith("RINGCOMM_TRANSPORT ") for item in caplog.records)
