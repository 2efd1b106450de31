"""Which error of ringcomm an error of a framework is about."""

from __future__ import annotations

import pytest

import ringcomm as rc
from ringcomm._adapter.causes import cause_of, record_cause, with_causes
from ringcomm.config import Membership

LOST = "rank 5 (jetson5) was lost while others were in allreduce"


def of_a_framework(error):
    return RuntimeError(f"INTERNAL: CpuCallback error: {type(error).__name__}: {error}\n  at step 3")


def test_it_is_found_by_its_text(alone):
    lost = rc.PeerLostError(LOST)
    record_cause(lost)
    assert cause_of(of_a_framework(lost)) is lost
    assert cause_of(RuntimeError("another mistake")) is None


def test_the_error_with_the_longest_text_is_chosen(alone):
    lost, misuse = rc.PeerLostError(LOST), rc.Misuse(f"This job has failed before. The failure was: {LOST}")
    for error in (lost, misuse, rc.Misuse("")):
        record_cause(error)
    assert cause_of(of_a_framework(misuse)) is misuse
    assert cause_of(RuntimeError("")) is None


def test_errors_of_an_earlier_job_are_ignored(alone):
    """Otherwise a program that quotes it would be started again for ever."""
    record_cause(rc.PeerLostError(LOST))
    rc.shutdown()
    rc.init(Membership())
    assert cause_of(RuntimeError(f"no data left after: {LOST}")) is None


def test_without_a_job_errors_of_no_job_are_found():
    lost = rc.StartupError("no rendezvous")
    record_cause(lost)
    assert cause_of(of_a_framework(lost)) is lost


def test_an_error_of_a_framework_is_replaced_by_its_cause(alone):
    lost = rc.PeerLostError(LOST)
    record_cause(lost)
    foreign = of_a_framework(lost)
    with pytest.raises(rc.PeerLostError) as caught, with_causes():
        raise foreign
    assert caught.value is lost and lost.__cause__ is foreign


@pytest.mark.parametrize(
    "error", [rc.Misuse("a call of ringcomm"), rc.HostsUpdatedInterrupt(), ValueError("another mistake")]
)
def test_other_errors_stay(alone, error):
    record_cause(rc.PeerLostError(LOST))
    with pytest.raises(type(error)) as caught, with_causes():
        raise error
    assert caught.value is error
