"""Groups of CUDA devices, with a stand-in for NCCL that works on the memory it is given the addresses of."""

from __future__ import annotations

import ctypes
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from ringcomm.arrays import nccl as module
from ringcomm.arrays.nccl import CudaStream, Nccl, NcclPort, find_nccl, identity_of
from ringcomm.collective.host_groups import even_chunks
from ringcomm.errors import DeviceError
from ringcomm.ops import Average, Max, Product, Sum

TYPES = {code: np.dtype(name) for name, code in module._TYPES.items() if name != "bfloat16"}
UFUNCS = {0: np.add, 1: np.multiply, 2: np.maximum, 3: np.minimum}


class Library:
    """What ``ctypes`` gives, of one member: it notes calls."""

    def __init__(self, members, fails=""):
        self.fails = fails
        self.queue = []
        self.aborts = 0
        members.append(self)
        for name in module._SIGNATURES:
            setattr(self, name, self._function(name))
        self.ncclGetErrorString = self._function("ncclGetErrorString")

    def _function(self, name):
        def call(*arguments):
            if name == "ncclGetErrorString":
                return b"out of order"
            if name == self.fails:
                return 5
            if name == "ncclGetVersion":
                arguments[0]._obj.value = 22105
            elif name == "ncclCommInitRank":
                assert bytes(arguments[2]) == b"t" * 128
                arguments[0]._obj.value = 77
            elif name == "ncclGetUniqueId":
                arguments[0]._obj.internal = b"t" * 128
            elif name == "ncclCommAbort":
                self.aborts += 1
            else:
                self.queue.append((name, *arguments))
            return 0

        return call


def at(address, count, code):
    """The elements at an address."""
    dtype = TYPES[code]
    memory = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    return np.frombuffer(memory, dtype)


def perform(members):
    """Do what all members have queued, as NCCL defines it."""
    for calls in zip(*(member.queue for member in members)):
        (name,) = {call[0] for call in calls}
        if name.startswith("ncclGroup"):
            continue
        assert all(call[-2].value == 77 and call[-1] == 5 for call in calls)
        send, into, (count, code) = [c[1] for c in calls], [c[2] for c in calls], calls[0][3:5]
        each, rest = len(members), calls[0][5:-2]
        length = count * each if name == "ncclReduceScatter" else count
        sources = [at(address, length, code).copy() for address in send]
        if name in ("ncclAllGather", "ncclBroadcast"):
            whole = np.concatenate(sources) if name == "ncclAllGather" else sources[rest[0]]
        else:
            whole = UFUNCS[rest[0]].reduce(sources)
        for rank, address in enumerate(into):
            if name == "ncclReduce" and rank != rest[1]:
                continue
            part = whole[rank * count : (rank + 1) * count] if name == "ncclReduceScatter" else whole
            at(address, part.size, code)[:] = part
    for member in members:
        member.queue.clear()


class Stream(CudaStream):
    handle = 5

    def current(self):
        return nullcontext()

    def follow(self, mark):
        self.followed = mark

    def done(self):
        return "done"

    def keep(self, array):
        return array.ctypes.data, array.dtype.name


def joined(size):
    members = []
    ports = [NcclPort(Nccl(Library(members)), Stream(), 9) for _ in range(size)]
    ticket = ports[0].ticket()
    return members, [port.join(ticket, rank, size) for rank, port in enumerate(ports)]


@pytest.mark.parametrize("count", [2, 3, 12, 13, 14])
@pytest.mark.parametrize(
    "op, ufunc", [(Sum, np.add), (Average, np.add), (Max, np.maximum), (Product, np.multiply)]
)
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_reductions_of_any_length(count, op, ufunc, dtype):
    size = 3
    members, groups = joined(size)
    before = [np.arange(count).astype(dtype) + rank for rank in range(size)]
    expected = ufunc.reduce(before)
    arrays = [array.copy() for array in before]
    for group, array in zip(groups, arrays):
        group.all_reduce(array, op)
    perform(members)
    assert all((array == expected).all() for array in arrays)
    bounds = even_chunks(count, size)
    arrays = [array.copy() for array in before]
    for group, array in zip(groups, arrays):
        group.reduce_scatter(array, bounds, op)
    perform(members)
    for rank, array in enumerate(arrays):
        own = slice(bounds[rank], bounds[rank + 1])
        assert (array[own] == expected[own]).all()
        array[: bounds[rank]] = array[bounds[rank + 1] :] = 99
    for group, array in zip(groups, arrays):
        group.all_gather(array, bounds)
    perform(members)
    assert all((array == expected).all() for array in arrays)


def test_scales_are_applied_to_the_array_itself():
    _, (group,) = joined(1)
    array = np.array([2.0, 6.0])
    group.scale(array, 2, 3.0)
    assert array.tolist() == [3.0, 9.0]
    group.follow("mark")
    assert group._stream.followed == "mark" and group.queued() == "done"


def test_after_an_abort_nothing_is_queued_any_more():
    members, (group,) = joined(1)
    group.abort()
    group.abort()
    assert members[0].aborts == 1
    with pytest.raises(DeviceError, match="aborted"):
        group.all_reduce(np.zeros(3), Sum)


def test_an_abort_does_not_wait_for_a_call_that_is_stuck(monkeypatch):
    monkeypatch.setattr(module, "_ABORT_AFTER_S", 0.01)
    members, (group,) = joined(1)
    with group._lock:  # as a call of another thread holds it that waits for a lost member
        thread = threading.Thread(target=group.abort)
        thread.start()
        thread.join(30.0)
        assert members[0].aborts == 1 and not thread.is_alive()
    with pytest.raises(DeviceError, match="aborted"):
        group.all_reduce(np.zeros(3), Sum)


@pytest.mark.parametrize("fails", ["ncclGetUniqueId", "ncclCommInitRank", "ncclAllReduce"])
def test_what_fails_is_named(fails):
    members = []
    port = NcclPort(Nccl(Library(members)), Stream(), 9)
    members[0].fails = fails
    with pytest.raises(DeviceError, match=f"{fails} failed: out of order"):
        port.ticket()
        port.join(b"t" * 128, 0, 2).all_reduce(np.zeros(3), Sum)


def test_elements_that_nccl_lacks_are_an_error():
    _, (group,) = joined(1)
    with pytest.raises(DeviceError, match="int16"):
        group.all_reduce(np.zeros(3, np.int16), Sum)


def test_the_version_is_in_the_name_and_devices_have_numbers():
    port = NcclPort(Nccl(Library([])), Stream(), 9)
    assert (port.name, port.version) == ("NCCL 2.21.5", 22105)
    one, other = identity_of("GPU-0a"), identity_of("GPU-0b")
    assert one != other and 0 < one < 1 << 62 and identity_of("gpu-0A") == one
    assert identity_of("") == identity_of("00-00") == 0


def test_without_the_library_the_reason_is_given(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: no such file")

    monkeypatch.setattr(module.ctypes, "CDLL", missing)
    find_nccl.cache_clear()
    assert find_nccl() == "NCCL cannot be used (libnccl.so.2: no such file)"
    monkeypatch.setattr(module.ctypes, "CDLL", lambda name: SimpleNamespace())
    find_nccl.cache_clear()
    assert "lacks a function" in find_nccl()
    find_nccl.cache_clear()
