"""What ranks that srun or mpirun has started read: MPICH's key-value store, and rank 0's file."""

from __future__ import annotations

import atexit
import contextlib
import json
import socket

import pytest
from hypothesis import strategies as st

from ringcomm.clock import Deadline
from ringcomm.config import Membership
from ringcomm.errors import StartupError
from ringcomm.rendezvous import launched, pmi
from tests.fuzz.cases import at_most, damaged, fuzz, values

pytestmark = pytest.mark.release

NOTICE = {
    "job": "launched-1", "key": "ab" * 32, "certificate": "", "machine": "m",
    "endpoints": [["10.0.0.1", 4000], ["fd00::1", 4000]],
}  # fmt: skip
answers = st.sampled_from(
    [
        b"cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1",
        b"cmd=my_kvsname kvsname=kvs_1",
        b"cmd=get_result rc=0 value=2",
        b"cmd=get_result rc=0 value=7b7d",
        b"cmd=get_result rc=0 value=ffffffff",
        b"cmd=get_result rc=0 value=-1",
        b"cmd=get_result rc=0 value=zz",
        b"cmd=get_result rc=-1 msg=key_not_found",
        b"cmd=barrier_out",
        b"=",
        b"",
        b"x" * 70_000,
    ]
)
lines = st.lists(answers, max_size=8).map(lambda items: b"".join(item + b"\n" for item in items))


def talk(said: bytes) -> str:
    """Return what a rank reads under a key from an mpirun that says this and then closes the connection."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        theirs.sendall(said)
        theirs.shutdown(socket.SHUT_WR)
        deadline = Deadline(30.0)  # nothing waits: the stream ends
        store = pmi.Pmi(ours.fileno(), deadline)
        atexit.unregister(store._finalize)
        store.barrier(deadline)
        return store.get("key", deadline)


GOOD = (
    b"cmd=response_to_init rc=0\ncmd=my_kvsname kvsname=kvs_1\ncmd=barrier_out\n"
    b"cmd=get_result rc=0 value=1\ncmd=get_result rc=0 value=7b7d\n"
)


def test_an_answer_as_it_should_be() -> None:
    assert talk(GOOD) == "{}"


@fuzz(st.one_of(lines, damaged(st.just(GOOD))))
def test_the_answers_of_mpirun(said):
    with at_most(4 << 20), contextlib.suppress(StartupError):
        assert isinstance(talk(said), str)


notices = st.one_of(
    damaged(st.just(json.dumps(NOTICE).encode())).map(lambda data: data.decode("utf-8", "replace")),
    values.map(json.dumps),
    st.sampled_from(sorted(NOTICE)).flatmap(
        lambda name: st.one_of(values, st.integers(), st.lists(st.integers())).map(
            lambda value: json.dumps({**NOTICE, name: value})
        )
    ),
)


@fuzz(notices)
def test_what_rank_0_has_published(text):
    membership = Membership(size=2, rank=1)
    with at_most(1 << 20), contextlib.suppress(StartupError):
        full = launched._with_notice(membership, text, "a file")
        assert all(isinstance(host, str) and 0 < port < 65536 for host, port in full.rendezvous)
        assert isinstance(full.key, bytes)
