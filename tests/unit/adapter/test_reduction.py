"""Options of reductions, waits for several operations, causes of frameworks' errors, and trees of arrays."""

from __future__ import annotations

import pytest

import ringcomm as rc
from ringcomm._adapter.compression import NoneCompressor
from ringcomm._adapter.graph_callbacks import put_together, take_apart
from ringcomm._adapter.reduction import Reduction, VariableReducer, chosen_groups, is_coded, predivided
from ringcomm._adapter.submit import cause_of, record_cause, run_all, with_causes
from ringcomm.config import Membership
from ringcomm.errors import ConfigError, PeerLostError, ShapeError


def test_what_groups_may_be():
    assert chosen_groups(None, 0, int) is None
    assert chosen_groups(None, 3, int) == 3
    assert chosen_groups(2, 3, int) == 2
    assert chosen_groups([[1], [2]], 0, int) == [[1], [2]]
    for bad in (0, -1, "all", [["a"]], [[1], [1]]):
        with pytest.raises(ConfigError):
            chosen_groups(bad, 0, int)


def test_a_compression_of_the_programs_own_converts_every_tensor():
    class Halved:
        @staticmethod
        def compress(tensor):
            return tensor / 2, tensor

        @staticmethod
        def decompress(tensor, context):
            return tensor, context

    how, sent, restore = Reduction(compression=Halved).prepared([2.0, 6.0])
    assert how.compression is NoneCompressor and not is_coded(Halved)
    assert sent == [1.0, 3.0] and restore([5.0, 7.0]) == [(5.0, 2.0), (7.0, 6.0)]


class Doubling(VariableReducer):
    """Stands in for a reduction over all ranks."""

    def reduce_shared(self, gradients, variables, absent, scope):
        self.absent = absent
        return [2 * gradient for gradient in gradients]


class TestGradientsOfVariables:
    @pytest.fixture
    def active(self, monkeypatch):
        """Whether there are ranks to reduce with: four."""
        monkeypatch.setattr(Reduction, "active", lambda how: True)
        monkeypatch.setattr("ringcomm._adapter.reduction.size_of", lambda process_set: 4)

    @pytest.mark.parametrize(("scaled", "local"), [(True, 2.0), (False, 8.0)])
    def test_those_of_local_variables_are_not_reduced(self, active, scaled, local):
        reducer = Doubling(scale_local=scaled)
        variables = [object() for _ in range(4)]
        reducer.register_local(variables[1])
        reducer.register_local(variables[3])
        assert [reducer.is_local(item) for item in variables] == [False, True, False, True]
        assert reducer.reduce([1.0, 8.0, None, None], variables, "scope") == [2.0, local, None, None]
        assert reducer.absent == variables[2:3]


def test_predivided():
    assert predivided(rc.Sum, 1.0) == (1.0, 1.0)
    assert predivided(rc.Average, 4) == (0.25, 4.0)
    with pytest.raises(ValueError):
        predivided(rc.Sum, 2.0)


def test_trees():
    tree = {"a": [1, 2.5, {"b": (3, "x")}], "c": 4}
    skeleton, leaves = take_apart(tree, lambda item: isinstance(item, int))
    assert leaves == [1, 3, 4]
    assert put_together(skeleton, [10, 30, 40]) == {"a": [10, 2.5, {"b": (30, "x")}], "c": 40}
    assert put_together(skeleton, leaves) == tree


def test_the_first_error_is_raised_when_all_have_ended():
    ended = []

    def end(number, error=None):
        ended.append(number)
        if error is not None:
            raise error

    with pytest.raises(ShapeError, match="first"):
        lost = PeerLostError("second", rank=1)
        run_all([lambda: end(1), lambda: end(2, ShapeError("first")), lambda: end(3, lost), lambda: end(4)])
    assert ended == [1, 2, 3, 4]
    with pytest.raises(ZeroDivisionError):
        run_all([lambda: 1 // 0, lambda: end(5)])
    assert ended[-1] == 5


LOST = "rank 5 (jetson5) was lost while others were in allreduce"


def test_errors_of_an_earlier_job_are_ignored(alone):
    """Otherwise a program that quotes it would be started again for ever."""
    record_cause(rc.PeerLostError(LOST))
    rc.shutdown()
    rc.init(Membership())
    assert cause_of(RuntimeError(f"no data left after: {LOST}")) is None


def test_an_error_of_a_framework_is_replaced_by_its_cause(alone):
    lost = rc.PeerLostError(LOST)
    record_cause(lost)
    foreign = RuntimeError(f"INTERNAL: CpuCallback error: PeerLostError: {lost}\n  at step 3")
    assert cause_of(RuntimeError("another mistake")) is None
    with pytest.raises(rc.PeerLostError) as caught, with_causes():
        raise foreign
    assert caught.value is lost and lost.__cause__ is foreign
