"""What the tests of executions are made of: a header, arrays, steps."""

from __future__ import annotations

import numpy as np
import pytest

from ringcomm.config import Settings
from ringcomm.errors import PeerStalledError
from ringcomm.ops import Collective, Sum
from ringcomm.schedule.steps import SELF, Recv
from ringcomm.wire.frames import NO_ROOT, Header
from ringcomm.wire.signature import direct_call

HEADER = Header(0, 1, Collective.ALLREDUCE, Sum, 5, NO_ROOT, 4, 99)


def numbers(*values):
    return np.array(values, np.int16)


def raw(*values):
    return numbers(*values).tobytes()


def fold_from(peer, start, stop, final=True):
    return Recv((peer,), start, stop, fold=(peer, SELF), final=final)


def peers(links):
    return [link.peer for link in links]


NOW = Settings(timeout_s=0.001)
"""Gives up at once: what a test needs lies on the wire before the call."""


def ones(count=4):
    return np.ones(count, np.float32)


def all_reduce(runner, data, op=Sum, residuals=None, **fields):
    """Make a direct call without further ado."""
    runner.all_reduce(data, direct_call(Collective.ALLREDUCE, data, op=op, **fields), residuals)


def broadcast(runner, data, root=0, **fields):
    runner.broadcast(data, direct_call(Collective.BROADCAST, data, root=root, **fields))


def fail(runner):
    """Break the runner by a silent peer."""
    with pytest.raises(PeerStalledError):
        all_reduce(runner, ones())
