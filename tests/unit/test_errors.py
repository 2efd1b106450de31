# ruff: noqa: F403, F405  all of them
"""The exception tree: its two branches, and the facts that errors carry."""

from __future__ import annotations

import pickle

import pytest

from ringcomm import errors
from ringcomm.errors import (
    BrokenInvariantError,
    ConfigError,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    LinkLostError,
    MismatchError,
    NotInitializedError,
    NotOfferedError,
    PeerLostError,
    PeerStalledError,
    Recoverable,
    ShapeError,
    StartTimeoutError,
    UnsupportedDtypeError,
)

ALL = [
    item
    for item in vars(errors).values()
    if isinstance(item, type) and issubclass(item, Exception) and item is not HorovodInternalError
]


@pytest.mark.parametrize(
    "kind, builtins",
    [
        (ConfigError, ValueError), (NotInitializedError, ValueError), (ShapeError, ValueError),
        (UnsupportedDtypeError, TypeError), (UnsupportedDtypeError, ValueError),
        (NotOfferedError, NotImplementedError), (StartTimeoutError, TimeoutError),
        (PeerLostError, ConnectionError), (PeerStalledError, TimeoutError), (LinkLostError, TimeoutError),
        (BrokenInvariantError, AssertionError),
    ],
)  # fmt: skip
def test_builtin_relatives(kind, builtins):
    assert issubclass(kind, builtins)


def test_horovods_users_catch_what_went_wrong_between_ranks():
    """... and nothing else; code that restarts training catches Recoverable, which a mistake never is."""
    caught = {kind for kind in ALL if issubclass(kind, HorovodInternalError)}
    lost = {PeerLostError, PeerStalledError, LinkLostError}
    assert caught == {MismatchError, ShapeError} | lost
    others = {NotOfferedError, HostsUpdatedInterrupt}
    assert {kind for kind in ALL if issubclass(kind, RuntimeError)} == caught | others
    assert {kind for kind in caught if issubclass(kind, Recoverable)} == lost


@pytest.mark.parametrize(
    "error, facts",
    [
        (PeerLostError("gone", rank=2, host="jetson2"), {"rank": 2, "host": "jetson2"}),
        (PeerStalledError("silent", rank=1), {"rank": 1, "host": None}),
        (MismatchError("differ", rank=0, peer=3), {"rank": 0, "peer": 3}),
        (HostsUpdatedInterrupt(True), {"skip_sync": True}),
    ],
)
def test_facts_survive_pickling(error, facts):
    """Results of ``ringcomm.run`` travel between processes, errors among them."""
    copy = pickle.loads(pickle.dumps(error))
    for one in (error, copy):
        assert {name: getattr(one, name) for name in facts} == facts
    assert (type(copy), str(copy)) == (type(error), str(error))
