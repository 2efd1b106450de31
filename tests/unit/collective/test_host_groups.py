"""How the devices of a host become a group, and how a group ends; the other ranks are the test's."""

from __future__ import annotations

import logging
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from ringcomm.collective import host_groups as module
from ringcomm.collective.device_group import DeviceGroup, DevicePort
from ringcomm.collective.host_groups import HostGroups, even_chunks
from ringcomm.collective.reduce import Kernel
from ringcomm.errors import DeviceError, PeerLostError
from ringcomm.ops import Average, Collective, Sum
from ringcomm.wire.frames import NO_ROOT
from ringcomm.wire.signature import Signature

LIMIT_S = 60.0
FLOAT32 = np.dtype(np.float32)
CALL = Signature(
    "grad", 0, int(Collective.ALLREDUCE), int(Sum), NO_ROOT, (FLOAT32.name,), ((12,),), items=12
)
ABLE, UNABLE, ON_HOST = [1, 7, 100], [0, 0, 0], [-1, 0, 0]
"""What a rank answers: whether it has a way, the number of its device, the version."""


class Group(DeviceGroup):
    """Notes what is queued."""

    def __init__(self):
        self.calls = []
        self.aborted = threading.Event()
        self.end = SimpleNamespace(poll=lambda: True)

    def current(self):
        return nullcontext()

    def follow(self, mark):
        self.calls.append("follow")

    def queued(self):
        return self.end

    def all_reduce(self, array, op):
        self.calls.append(("all_reduce", op))

    def reduce_scatter(self, array, bounds, op):
        self.calls.append(("reduce_scatter", bounds))

    def all_gather(self, array, bounds):
        self.calls.append(("all_gather", bounds))

    def scale(self, array, divisor, factor):
        self.calls.append(("scale", len(array), divisor, factor))

    def abort(self):
        self.aborted.set()


class Port(DevicePort):
    name, version, identity = "stand-in 1.0", 100, 5

    def __init__(self, group=None, fails=None):
        self.group = Group() if group is None else group
        self.fails = fails
        self.joined = []

    def ticket(self):
        return b"ticket"

    def join(self, ticket, rank, size):
        self.joined.append((ticket, rank, size))
        if self.fails is not None:
            raise self.fails
        return self.group


class Mirror:
    """Of this rank's array."""

    def __init__(self, port, count=12):
        self._port = port
        self.array = np.ones(count, np.float32)
        self.host = self.array
        self.done = []

    def port(self, owner):
        return self._port

    def enter(self, group, wait):
        group.follow("mark")
        return self.array

    def part(self, array, start, stop):
        part = Mirror(None, stop - start)
        part.finish = lambda: self.done.append((start, stop))
        return part

    def leave(self, group):
        self.done.append("left")


class Ranks:
    """A runner; ``others`` are the rows of the other ranks, one list for each exchange."""

    timeout_s = 30.0
    await_copy = None

    def __init__(self, *others):
        self.others = list(others)
        self.calls = []

    def exchange(self, values, kind, dtype, name, shape, op):
        assert (kind, dtype, name, shape, op) == (Collective.ALLREDUCE, FLOAT32, "grad", (12,), Sum)
        return np.array([list(values), *self.others.pop(0)])

    def broadcast(self, array, root, name):
        self.calls.append(("broadcast", root))

    def all_reduce(self, array, op, name, shape, mirror):
        self.calls.append(("all_reduce", op, mirror.host.size))

    def progress(self):
        return "progress"

    def totals(self):
        return "totals"


def groups_of(whole, hosts=((0, 1),), watch=None):
    made, reporter = [], SimpleNamespace(abort_error=None)

    def make(ranks):
        made.append((tuple(ranks), Ranks()))
        return made[-1][1]

    groups = HostGroups(hosts, 0, whole, make, reporter, watch)
    groups.made, groups.reporter = made, reporter
    return groups


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.DEBUG, "ringcomm")
    return lambda: [record.getMessage() for record in caplog.records]


def active(hosts=((0, 1),), group=None):
    """Groups that have been made."""
    size = sum(map(len, hosts))
    whole = Ranks([[1, 7 + rank, 100] for rank in range(1, size)], [[1]] * (size - 1))
    groups, port = groups_of(whole, hosts), Port(group)
    groups.prepare(CALL, Mirror(port))
    assert groups.active and groups.decided
    return groups, port, whole


class TestPreparation:
    def test_all_devices_of_a_host_join_with_its_first_ranks_ticket(self, lines):
        groups, port, _ = active()
        assert port.joined == [(b"ticket", 0, 2)]
        assert [ranks for ranks, _ in groups.made] == [(0, 1)]
        assert lines()[-1].endswith("use stand-in 1.0 between the 2 devices of this host.")
        groups.close()

    def test_ranks_with_the_same_place_exchange_between_hosts(self, lines):
        groups, _, _ = active(((0, 1), (2, 3)))
        assert [ranks for ranks, _ in groups.made] == [(0, 1), (0, 2)]
        assert lines()[-1].endswith("between the 2 devices of each host, and TCP between 2 hosts.")
        assert (groups.progress(), groups.totals()) == (None, "totals")
        groups.close()

    def test_while_an_array_is_in_host_memory_nothing_is_decided(self):
        groups = groups_of(Ranks([ON_HOST], [ABLE]))
        groups.prepare(CALL, Mirror(Port()))
        groups.prepare(CALL, None)
        assert not groups.decided and not groups.active and groups.made == []

    @pytest.mark.parametrize(
        "other, reason",
        [
            (UNABLE, "rank 1 has no way to reach other devices"),
            ([1, 7, 99], "rank 0 and rank 1 have different versions of it"),
            ([1, 5, 100], "rank 0 and rank 1 use the same device"),
        ],
    )
    def test_what_keeps_devices_from_a_group_is_found_before_they_join(self, other, reason, lines):
        groups, port = groups_of(Ranks([other])), Port()
        groups.prepare(CALL, Mirror(port))
        assert groups.decided and not groups.active and port.joined == []
        assert lines()[-1].endswith(f"go through host memory: {reason}.")

    def test_a_device_without_a_way_says_why(self, lines):
        groups = groups_of(Ranks([ABLE]))
        groups.prepare(CALL, Mirror("NCCL cannot be used"))
        assert lines()[-1].endswith("go through host memory: NCCL cannot be used.")

    @pytest.mark.parametrize(
        "problem, reason",
        [(DeviceError("no peer access"), "no peer access"), (KeyError("x"), "KeyError: 'x'")],
        ids=["device", "bug"],
    )
    def test_a_device_that_cannot_join_is_the_reason(self, problem, reason, lines):
        groups = groups_of(Ranks([ABLE], [[1]]))
        groups.prepare(CALL, Mirror(Port(fails=problem)))
        assert groups.decided and not groups.active
        assert lines()[-1].endswith(f"go through host memory: {reason}.")

    def test_if_another_device_cannot_join_this_one_leaves(self, lines):
        groups, port = groups_of(Ranks([ABLE], [[0]])), Port()
        groups.prepare(CALL, Mirror(port))
        assert not groups.active and port.group.aborted.is_set()
        assert lines()[-1].endswith("rank 1 could not join the group of its host.")

    @pytest.fixture
    def stuck(self, monkeypatch):
        """A port whose other members never come, until the test is over."""
        monkeypatch.setattr(module, "_LOOK_S", 0.005)
        over, port = threading.Event(), Port()
        port.join = lambda ticket, rank, size: over.wait(LIMIT_S)
        yield port
        over.set()

    def test_devices_that_do_not_find_each_other_give_up(self, stuck, monkeypatch, lines):
        monkeypatch.setattr(module, "JOIN_S", 0.01)
        groups = groups_of(Ranks([ABLE], [[0]]))
        groups.prepare(CALL, Mirror(stuck))
        assert not groups.active
        assert lines()[-1].endswith("have not found each other in 0.01 s.")

    def test_the_end_of_the_job_ends_their_wait(self, stuck):
        def check():
            raise PeerLostError("rank 1 is gone")

        groups = groups_of(Ranks([ABLE], [[0]]), watch=SimpleNamespace(check=check))
        with pytest.raises(PeerLostError, match="rank 1 is gone"):
            groups.prepare(CALL, Mirror(stuck))


class TestReductions:
    def test_within_one_host(self):
        groups, port, whole = active()
        whole.others = [[[1]], [[0]]]
        mirror = Mirror(port)
        assert groups.all_reduce(CALL, mirror, Kernel(Average, FLOAT32, 2, 0.5, 3.0), Average)
        assert port.group.calls == [
            "follow", ("scale", 12, 1, 0.5), ("all_reduce", Average), ("scale", 12, 2, 3.0),
        ]  # fmt: skip
        assert mirror.done == ["left"]
        port.group.calls.clear()
        assert not groups.all_reduce(CALL, mirror, Kernel(Sum, FLOAT32, 2), Sum), "rank 1's is on the host"
        assert port.group.calls == []
        groups.close()

    def test_between_hosts_a_chunk_is_summed(self):
        groups, port, whole = active(((0, 1), (2, 3)))
        whole.others = [[[1]] * 3]
        whole.timeout_s = 12.0
        mirror, column = Mirror(port), groups.made[-1][1]
        assert groups.all_reduce(CALL, mirror, Kernel(Average, FLOAT32, 4), Average)
        assert port.group.calls == [
            "follow", ("scale", 12, 1, 1.0), ("reduce_scatter", (0, 6, 12)), ("scale", 6, 4, 1.0),
            ("all_gather", (0, 6, 12)),
        ]  # fmt: skip
        assert column.calls == [("all_reduce", Sum, 6)] and column.timeout_s == 12.0
        assert mirror.done == [(0, 6), "left"]
        groups.close()

    def test_the_progress_of_the_exchange_between_hosts_is_known(self):
        groups, port, whole = active(((0, 1), (2, 3)))
        whole.others, column, seen = [[[1]] * 3], groups.made[-1][1], []
        column.all_reduce = lambda *arguments, **options: seen.append(groups.progress())
        groups.all_reduce(CALL, Mirror(port), Kernel(Sum, FLOAT32, 4), Sum)
        assert seen == ["progress"] and groups.progress() is None
        groups.close()

    def test_after_a_failure_the_group_is_aborted(self):
        groups, port, whole = active()
        whole.others = [[[1]]]

        def lost(array, op):
            raise DeviceError("illegal address")

        port.group.all_reduce = lost
        with pytest.raises(DeviceError, match="illegal address"):
            groups.all_reduce(CALL, Mirror(port), Kernel(Sum, FLOAT32, 2), Sum)
        assert port.group.aborted.is_set()
        groups.close()


class TestEnd:
    def test_what_is_queued_is_done_first(self):
        group, polls = Group(), []

        def poll():
            polls.append(group.aborted.is_set())
            return len(polls) == 3

        group.end = SimpleNamespace(poll=poll)
        groups, _, _ = active(group=group)
        groups.close()
        assert polls == [False] * 3 and group.aborted.is_set() and not groups.active
        groups.close()  # again, without effect
        assert len(polls) == 3

    def test_work_that_has_failed_is_not_waited_for(self, lines):
        def poll():
            raise DeviceError("illegal address")

        group = Group()
        group.end = SimpleNamespace(poll=poll)
        groups, _, _ = active(group=group)
        groups.close()
        assert group.aborted.is_set()
        assert "the last work of the devices has failed: illegal address" in lines()

    def test_an_aborted_job_is_noticed_without_a_call(self, monkeypatch):
        """Devices would wait for a lost one for ever."""
        monkeypatch.setattr(module, "_LOOK_S", 0.005)
        group = Group()
        group.end = SimpleNamespace(poll=lambda: False)
        groups, _, _ = active(group=group)
        groups.reporter.abort_error = PeerLostError("rank 1 is gone")
        assert group.aborted.wait(LIMIT_S)
        groups.close()

    def test_without_a_group_there_is_nothing_to_end(self):
        groups = groups_of(Ranks())
        groups.close()
        assert (groups.progress(), groups.totals(), groups.active) == (None, None, False)


@pytest.mark.parametrize(
    "count, size, bounds", [(12, 3, (0, 4, 8, 12)), (11, 3, (0, 3, 6, 11)), (2, 3, (0, 0, 0, 2))]
)
def test_all_chunks_but_the_last_are_equally_long(count, size, bounds):
    assert even_chunks(count, size) == bounds
