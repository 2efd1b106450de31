"""Which of a bucket's arrays are loaded and stored, for arrays that devices hold and others beside them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from ringcomm.engine.mirrors import fetch_all, mirrors_of, store_all


class Runner:
    def __init__(self):
        self.fetched = []

    def fetch(self, mirrors):
        self.fetched.append(list(mirrors))


class Mirror:
    def __init__(self):
        self.stored = []

    def store(self, start, stop):
        self.stored.append((start, stop))


def bucket():
    """Three arrays of two requests, of which a device holds the second."""
    arrays = [np.zeros(count) for count in (3, 4, 5)]
    mirror = Mirror()
    requests = [
        SimpleNamespace(arrays=arrays[:2], mirrors=[None, mirror]),
        SimpleNamespace(arrays=arrays[2:], mirrors=()),
        None,  # of a rank that has joined
    ]
    return arrays, mirror, mirrors_of(requests)


def test_only_arrays_on_devices_have_mirrors():
    arrays, mirror, mirrors = bucket()
    assert mirrors == {id(arrays[1]): mirror}
    assert mirrors_of([None, SimpleNamespace(arrays=arrays, mirrors=())]) == {}


def test_what_is_loaded_and_stored():
    arrays, mirror, mirrors = bucket()
    runner = Runner()
    fetch_all(arrays, mirrors, runner)
    assert runner.fetched == [[mirror]]
    store_all(arrays, mirrors)
    assert mirror.stored == [(0, 32)]
