"""Several devices in a host: all-reduces from device to device there, and over the links between hosts."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from ringcomm.collective.host_groups import HostGroups
from ringcomm.config import Settings
from ringcomm.errors import MismatchError, RingcommError
from ringcomm.ops import Average, Max, Min, Product, Sum
from ringcomm.testing.cluster import RankFailed, run_ranks
from tests.integration.arrays.fake_lab import FakeLab, start, submitted_in_place
from tests.support.device_contract import CHECKS, LONG, check_repeated, numbers, same
from tests.support.fake_group import FakeGroup

SETTINGS = Settings(spin_us=0.0, timeout_s=30.0, start_timeout_s=30.0, segment_bytes=8192)
HOSTS = [(1, 2), (1, 3), (2, 2), (3, 2)]
"""Numbers of hosts, and of devices in each."""


def run_groups(hosts, work, **options):
    """Call ``work(context, lab)`` on ranks whose devices can be in groups."""
    count, each = hosts

    def run(context):
        with FakeLab(context.rank, delay_s=0.0005, group_fails="") as lab:
            return work(context, lab)

    return run_ranks(count * each, run, ranks_per_host=each, settings=SETTINGS, **options)


def agree(context, lab):
    """As many all-reduces as ranks need to see that all arrays are on devices, and one in the groups."""
    for _ in range(context.size):
        context.allreduce_(lab.array(np.zeros(LONG, np.float32)), op=Sum)


def groups_of(lab):
    return lab.device.port.groups


def expected_of(hosts, cases):
    """What NumPy arrays give, for options and types."""

    def work(context):
        return [context.allreduce(numbers(context, LONG + 5, dtype=dtype), **how) for dtype, how in cases]

    return run_ranks(hosts[0] * hosts[1], work, ranks_per_host=hosts[1], settings=SETTINGS)


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_numbers_are_those_of_numpy_arrays(hosts):
    cases = [
        ("float32", {"op": Sum}),
        ("float32", {"op": Average}),
        ("float64", {"op": Average, "prescale_factor": 0.5, "postscale_factor": 3.0}),
        ("int32", {"op": Max}),
        ("int64", {"op": Min}),
        ("int32", {"op": Product}),
    ]
    expected = expected_of(hosts, cases)

    def work(context, lab):
        agree(context, lab)
        for (dtype, how), wanted in zip(cases, expected[context.rank]):
            values = numbers(context, LONG + 5, dtype=dtype)
            array = lab.array(values)
            lab.add_slowly(array, 0)
            made = context.allreduce(array, **how)
            lab.add_slowly(array, 1)  # The argument belongs to the program again.
            same(lab.numpy(made), wanted, f"{dtype} {how}")
            array = lab.array(values)
            context.allreduce_(array, **how)
            same(lab.numpy(array), wanted, f"in place, {dtype} {how}")
        (group,) = groups_of(lab)
        return group.calls

    calls = run_groups(hosts, work)
    each = 2 if hosts[0] > 1 else 1  # reduce-scatter and all-gather, or one all-reduce
    assert calls == [(1 + 2 * len(cases)) * each] * len(calls)


@pytest.mark.parametrize("hosts", [(1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_suite_of_devices(check, hosts):
    """Arrays of host memory and of devices take turns in it, so groups are entered and left again."""
    run_groups(hosts, check)


@pytest.mark.parametrize("hosts", [(1, 2), (2, 2)], ids=str)
def test_operations_by_name(hosts):
    (expected,) = expected_of(hosts, [("float32", {"op": Sum})])[0]

    def work(context, lab):
        for step in range(context.size + 2):
            array = lab.array(numbers(context, LONG + 5))
            lab.add_slowly(array, 0)
            start(context, submitted_in_place(context, array), str(step)).wait()
            same(lab.numpy(array), expected, "by name")
        before = lab.device.bytes_out
        array = lab.array(numbers(context, LONG + 5))
        start(context, submitted_in_place(context, array), "last").wait()
        same(lab.numpy(array), expected, "by name")
        (group,) = groups_of(lab)
        return group.calls > 0, lab.device.bytes_out - before

    found = run_groups(hosts, work)
    # Nothing is loaded but this rank's part of what goes to other hosts: half of the array.
    half = 4 * (LONG + 5) // 2
    loads = [0, 0] if hosts[0] == 1 else [half - 2, half + 2] * 2
    assert found == [(True, nbytes) for nbytes in loads]


def test_every_rank_of_a_host_sends_its_part_to_other_hosts():
    def work(context, lab):
        agree(context, lab)
        before = sent(context)
        context.allreduce_(lab.array(numbers(context, LONG, dtype="int32")), op=Sum)
        after = sent(context)
        return [after[peer] - before[peer] for peer in range(4)]

    def sent(context):
        peers = context._runner.totals().peers
        return [peers[peer].sent_bytes if peer in peers else 0 for peer in range(4)]

    for rank, passed in enumerate(run_groups((2, 2), work)):
        across = (rank + 2) % 4
        assert passed[across] > 4 * LONG // 2  # a half of the array, and headers
        assert all(count < 2000 for peer, count in enumerate(passed) if peer != across)


def test_what_devices_do_not_reduce_alike_goes_through_host_memory():
    """NCCL has no int16 and complex numbers, and leaves NaN out of maxima."""
    kinds = [("int16", Sum), ("bool", Sum), ("complex64", Sum), ("float32", Max), ("float64", Min)]

    def of(context, dtype):
        values = numbers(context, 4 * LONG).astype(dtype)
        if values.dtype.kind == "f" and context.rank == 1:
            values[7] = np.nan
        return values

    def plain(context):
        return [context.allreduce(of(context, dtype), op=op) for dtype, op in kinds]

    expected = run_ranks(2, plain, ranks_per_host=2, settings=SETTINGS)

    def work(context, lab):
        agree(context, lab)
        context.allreduce_(lab.array(of(context, "float32")), op=Sum)
        (group,) = groups_of(lab)
        before = group.calls
        for (dtype, op), wanted in zip(kinds, expected[context.rank]):
            found = lab.numpy(context.allreduce(lab.array(of(context, dtype)), op=op))
            np.testing.assert_array_equal(found, wanted, dtype)
        return before, group.calls

    for before, after in run_groups((1, 2), work):
        assert before == after > 0


def test_a_rank_with_an_array_in_host_memory_takes_part():
    def work(context, lab):
        values = numbers(context, LONG, dtype="int32")
        agree(context, lab)
        for step in range(6):
            on_host = step == 2 and context.rank == 1
            array = values.copy() if on_host else lab.array(values)
            context.allreduce_(array, op=Max)
            found = array if on_host else lab.numpy(array)
            same(found, expected[0], f"step {step}")
        return groups_of(lab)[0].calls

    expected = run_ranks(2, lambda context: context.allreduce(numbers(context, LONG, dtype="int32"), op=Max))
    # Call 2, of which one array is in host memory, goes through that; so does call 3, with new votes.
    assert run_groups((1, 2), work) == [1 + 2 + 2] * 2


@pytest.mark.parametrize("transport", ["memory", "tcp"])
def test_different_calls_are_an_error_before_devices_wait_for_each_other(transport):
    def work(context, lab):
        agree(context, lab)
        with pytest.raises(MismatchError) as caught:
            context.allreduce_(lab.array(numbers(context, LONG + context.rank)), op=Sum)
        return groups_of(lab)[0].calls, str(caught.value)

    for calls, text in run_groups((1, 2), work, transport=transport):
        assert calls == 1 and "allreduce" in text


# ---- the choice ----------------------------------------------------------------------------------


def logged(caplog):
    return [item.getMessage() for item in caplog.records if "All-reduces of arrays on" in item.getMessage()]


@pytest.mark.parametrize(
    "hosts, words",
    [
        ((1, 2), "2 devices of this host."),
        ((2, 2), "2 devices of each host, and TCP between 2 hosts."),
    ],
)
def test_one_line_of_the_log_says_that_devices_exchange_directly(hosts, words, caplog):
    caplog.set_level(logging.INFO, "ringcomm")
    run_groups(hosts, check_repeated)
    assert logged(caplog) == [f"All-reduces of arrays on devices use fake NCCL 1.0 between the {words}"]


@pytest.mark.parametrize(
    "options, words",
    [
        ([{}, {}], "fake devices without a port are alone"),
        ([{"group_fails": ""}, {}], "rank 1 has no way to reach other devices"),
        ([{"group_fails": "ticket"}, {"group_fails": ""}], "this ticket was to fail"),
        ([{"group_fails": "join"}, {"group_fails": ""}], "this device was not to join"),
        ([{"group_fails": ""}, {"group_fails": "join"}], "a member has failed"),
    ],
)
def test_without_a_group_arrays_go_through_host_memory_and_the_log_says_why(options, words, caplog):
    caplog.set_level(logging.INFO, "ringcomm")

    def work(context):
        with FakeLab(context.rank, **options[context.rank]) as lab:
            agree(context, lab)
            array = lab.array(numbers(context, LONG, dtype="int32"))
            context.allreduce_(array, op=Max)
            return lab.numpy(array), lab.device.copies_out

    expected = run_ranks(2, lambda context: context.allreduce(numbers(context, LONG, dtype="int32"), op=Max))
    for found, copies in run_ranks(2, work, ranks_per_host=2, settings=SETTINGS):
        same(found, expected[0], "through host memory")
        assert copies
    (line,) = logged(caplog)
    assert line.endswith(f"go through host memory: {words}.")


def test_two_ranks_on_one_device_do_not_make_a_group(caplog):
    caplog.set_level(logging.INFO, "ringcomm")
    with FakeLab(0, group_fails="") as lab:
        run_ranks(2, lambda context: check_repeated(context, lab), ranks_per_host=2, settings=SETTINGS)
    assert logged(caplog)[0].endswith("rank 0 and rank 1 use the same device.")


def test_calls_in_order_and_by_name_do_not_both_have_groups(caplog):
    """Devices could begin with the work of different groups, and wait for each other."""
    caplog.set_level(logging.INFO, "ringcomm")

    def work(context, lab):
        check_repeated(context, lab)
        for step in range(3):
            array = lab.array(np.ones(LONG, np.float32))
            start(context, submitted_in_place(context, array), str(step)).wait()
            same(lab.numpy(array), np.full(LONG, 2, np.float32), "by name")
        return len(groups_of(lab))

    assert run_groups((1, 2), work) == [1, 1]
    assert logged(caplog)[1].endswith("the devices are in groups for other calls of this program already.")


# ---- what is missing, and what fails ---------------------------------------------------------------


def group_before_the_program(monkeypatch):
    """The group's work does not wait for what the program has queued."""
    monkeypatch.setattr(FakeGroup, "follow", lambda group, mark: None)


def exchange_before_the_group(monkeypatch):
    """What is sent to other hosts is loaded before the devices have reduced it."""
    between = HostGroups._between_hosts

    def unordered(groups, column, call, part, op):
        part._marked = [True, True]
        between(groups, column, call, part, op)

    monkeypatch.setattr(HostGroups, "_between_hosts", unordered)


def program_before_the_group(monkeypatch):
    """The program's stream does not wait for the group."""
    monkeypatch.setattr(FakeGroup, "queued", lambda group: group._device.stream().put())


@pytest.mark.parametrize(
    "missing",
    [group_before_the_program, exchange_before_the_group, program_before_the_group],
    ids=lambda missing: missing.__name__,
)
def test_a_missing_wait_is_found(missing, monkeypatch):
    missing(monkeypatch)

    def work(context, lab):
        agree(context, lab)
        for _ in range(300):
            array = lab.array(numbers(context, LONG, dtype="int32"))
            lab.add_slowly(array, 0)
            context.allreduce_(array, op=Max)
            same(lab.numpy(array), expected[0], "all-reduce")

    expected = run_ranks(4, lambda context: context.allreduce(numbers(context, LONG, dtype="int32"), op=Max))
    with pytest.raises(RankFailed) as caught:
        run_groups((2, 2), work)
    assert isinstance(caught.value.__cause__, AssertionError)


@pytest.mark.parametrize("hosts", [(1, 2), (1, 3)], ids=str)
def test_a_lost_rank_ends_the_waits_of_the_other_devices(hosts):
    """It has not entered the group's work, so without an abort the other devices would wait for ever."""

    def lost(array, op):
        raise RuntimeError("lost in the group")

    def work(context, lab):
        agree(context, lab)
        array = lab.array(numbers(context, LONG, dtype="int32"))
        if context.rank == 1:
            context._runner._groups._group.all_reduce = lost
        with pytest.raises(RingcommError) as caught:
            context.allreduce_(array, op=Sum)  # raises if the abort comes before it has ended
            lab.numpy(array)  # On a GPU, torch.cuda.synchronize(): no call of ringcomm waits here.
            assert groups_of(lab)[0].aborted
            context.barrier()
        found[context.rank] = str(caught.value)

    found = {}
    with pytest.raises(RankFailed) as caught:
        run_groups(hosts, work, transport="tcp")
    errors = caught.value.errors
    assert "lost in the group" in str(errors[1])
    assert [error for rank, error in enumerate(errors) if rank != 1] == [None] * (len(errors) - 1)
    assert all("rank 1" in text for text in found.values()) and len(found) == len(errors) - 1
