# ruff: noqa: F403, F405  all of them
"""The exception tree: its two branches, and the facts that errors carry."""

from __future__ import annotations

import pickle

import pytest

from ringcomm import errors
from ringcomm.errors import *
from ringcomm.errors import describe_error

ALL = [
    item
    for item in vars(errors).values()
    if isinstance(item, type) and issubclass(item, Exception) and item is not HorovodInternalError
]
PLACE = {
    Misuse: [
        ConfigError, NotInitializedError, UnsupportedDtypeError, MismatchError, DuplicateNameError,
        ShapeError, NotOfferedError, DesyncError,
    ],
    StartupError: [StartTimeoutError, RefusedError, AuthenticationError, NoRouteError],
    Recoverable: [PeerLostError, PeerStalledError, LinkLostError],
    RingcommError: [BrokenInvariantError, ProtocolError, HostsUpdatedInterrupt, DeviceError, RemoteError],
}  # fmt: skip


def test_everything_has_one_place_in_the_tree():
    placed = [RingcommError, Misuse, StartupError, Recoverable]
    placed += [item for items in PLACE.values() for item in items]
    assert sorted(map(repr, placed)) == sorted(map(repr, ALL))


def test_branches_are_exclusive():
    for kind in ALL:
        assert issubclass(kind, RingcommError) and kind.__doc__
        assert sum(issubclass(kind, branch) for branch in (Misuse, StartupError, Recoverable)) <= 1
        if kind is not HostsUpdatedInterrupt:
            assert str(kind("what happened")) == "what happened"
    for branch, kinds in PLACE.items():
        assert all(issubclass(kind, branch) for kind in kinds)


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


def test_an_exception_on_one_line():
    assert describe_error(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert describe_error(KeyError("x")) == "KeyError: 'x'"
