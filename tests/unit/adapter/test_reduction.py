"""The options of a reduction: what the arguments of optimizers become."""

from __future__ import annotations

import pytest

from ringcomm._adapter.compression import NoneCompressor
from ringcomm._adapter.reduction import Reduction, VariableReducer, chosen_groups, is_coded
from ringcomm.errors import ConfigError


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
