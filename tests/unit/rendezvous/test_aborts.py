"""The errors that end a job, made from messages of the rendezvous."""

from __future__ import annotations

import pytest

from ringcomm.errors import (
    LinkLostError,
    MismatchError,
    NoRouteError,
    PeerLostError,
    PeerStalledError,
    RingcommError,
    StartTimeoutError,
)
from ringcomm.rendezvous.aborts import error_from, without_rendezvous

ABORT = {"type": "abort", "kind": "lost", "text": "rank 2 (jetson2) was lost", "rank": 2, "host": "jetson2"}


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({}, PeerLostError),
        ({"kind": "stalled"}, PeerStalledError),
        ({"kind": "cut", "ranks": [0, 2], "hosts": ["desk", "jetson2"]}, LinkLostError),
        ({"kind": "mismatch"}, MismatchError),
        ({"kind": "timeout"}, StartTimeoutError),
        ({"kind": "no_route"}, NoRouteError),
        ({"kind": "of a later version"}, RingcommError),
    ],
)
def test_errors_of_abort_messages(change, kind):
    error = error_from({**ABORT, **change})
    assert type(error) is kind and str(error) == ABORT["text"]
    if kind is LinkLostError:
        assert error.ranks == (0, 2) and error.hosts == ("desk", "jetson2")
    elif issubclass(kind, PeerLostError):
        assert (error.rank, error.host) == (2, "jetson2")


def test_the_end_of_a_rendezvous():
    error = without_rendezvous("it closed the connection", None, "", None)
    assert "ringrun, or the process that served it, has ended" in str(error) and error.rank is None
    error = without_rendezvous("it closed the connection", 2, "rank 2 (jetson2)", "jetson2")
    assert str(error).startswith("rank 2 (jetson2) was lost: it closed the connection.")
    assert (error.rank, error.host) == (2, "jetson2")
