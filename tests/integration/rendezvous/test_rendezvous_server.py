"""The server of a job, without ranks: what it takes from connections with the key, and when it is idle."""

from __future__ import annotations

import pytest

from ringcomm.rendezvous.epoch import Phase
from ringcomm.version import __version__
from tests.integration.rendezvous.peer import Peer
from tests.support.service import eventually


def join(peer, local):
    request = {"type": "join", "version": __version__, "hostname": "here", "pid": 100 + local}
    peer.send({**request, "addresses": [], "slot": [0, local]})


@pytest.fixture
def peer(service):
    """`peer()`: another process of a job of two ranks; the job is `peer.job`."""
    made = []

    def connect():
        made.append(Peer(connect.job.endpoints, connect.job.key, connect.job.job))
        return made[-1]

    connect.job = service(2)
    yield connect
    for item in made:
        item.sock.close()


@pytest.mark.parametrize("kind", ["ping", "go", "unblocked"])
def test_what_only_a_rendezvous_sends_ends_the_connection(peer, kind):
    message = {"type": kind, "table": ""}
    one, other = peer(), peer()
    one.send(message)
    assert one.next() is None
    join(other, 0)
    assert eventually(lambda: peer.job.texts("joined") != []), "others are not concerned"
    assert peer.job.server.failure is None and peer.job.server.culprit == -1


def test_a_rank_that_fails_is_the_culprit(peer):
    one, other = peer(), peer()
    join(one, 0)
    join(other, 1)
    assert (one.until("probe")["rank"], other.until("probe")["rank"]) == (0, 1)
    peer.job.server.process_exited(1, "killed by SIGKILL", False)
    abort = one.until("abort")
    assert abort["rank"] == 1 and "killed by SIGKILL" in abort["text"]
    assert peer.job.server.phase is Phase.ABORTED
    assert peer.job.server.culprit == 1 and "killed by SIGKILL" in str(peer.job.server.failure)


def test_it_is_idle_when_no_rank_is_connected_but_those_that_wait_for_the_next_generation(peer):
    server = peer.job.server
    assert server.wait_idle(0.0)
    one, other = peer(), peer()
    join(one, 0)
    join(other, 1)
    assert one.until("probe") and other.until("probe")
    assert not server.wait_idle(0.0)
    one.sock.close()
    other.sock.close()
    assert server.wait_idle(30.0)


def test_entries_of_a_process_that_has_gone_are_not_waited_for(peer):
    """One waits for an entry and ends; the other one's wait is answered when it is posted."""
    gone, waiting, posting = peer(), peer(), peer()
    for item in (gone, waiting):
        item.send({"type": "await", "entry": "group 1"})
    gone.sock.close()
    assert eventually(lambda: len(peer.job.server.numbers) == 2)
    posting.send({"type": "post", "entry": "group 1", "text": "where it is"})
    wanted = {"type": "entry", "entry": "group 1", "text": "where it is"}
    assert waiting.next() == [wanted]
