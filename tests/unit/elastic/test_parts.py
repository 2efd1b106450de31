"""State in parts: each part saves, restores and sends its own values."""

from __future__ import annotations

from typing import Any, List

import pytest

import ringcomm
from ringcomm import api
from ringcomm.elastic import parts, state
from ringcomm.errors import ConfigError, PeerLostError


class Variable:
    """A framework's variable, as far as a part is concerned."""

    def __init__(self, number: float) -> None:
        self.number = number


class Layer:
    def __init__(self, *numbers: float) -> None:
        self.variables = [Variable(number) for number in numbers]


class Thing:
    def __init__(self, number: float) -> None:
        self.number = number

    def state_dict(self) -> float:
        return self.number

    def load_state_dict(self, number: float) -> None:
        self.number = number


def test_a_loss_between_two_parts_leaves_no_state_that_counts_as_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two processes with equal positions have equal states: one with half of a newer state has none."""
    first, second = Thing(5), Thing(5)
    made = parts.PartsState({"first": parts.DictPart(first), "second": parts.DictPart(second)})
    made._position, sent = 5, [6]

    def broadcast(value: Any, *_: Any, **__: Any) -> Any:
        if not sent:
            raise PeerLostError("rank 0 is gone")
        return sent.pop()

    monkeypatch.setattr(api, "gather_positions", lambda position: [6, position])
    monkeypatch.setattr(parts, "broadcast_object", broadcast)
    with pytest.raises(PeerLostError):
        state._synchronize(made)
    made.restore()
    assert (first.number, second.number, made._position) == (6, 5, 0)


def numbers_of(variables: List[Variable]) -> List[float]:
    return [item.number for item in variables]


def assign(variables: List[Variable], values: List[float]) -> None:
    for item, value in zip(variables, values):
        item.number = value


class Optimizer:
    built = False

    def build(self, variables: Any) -> None:
        self.built, self.variables = True, list(variables)


class Model:
    built = True

    def __init__(self) -> None:
        self.trainable_variables = [Variable(1.0)]
        self.optimizer: Any = None


def part_of(value: Any, sent: List[Any]) -> parts.VariablesPart:
    return parts.VariablesPart(value, numbers_of, assign, sent.append)


@pytest.fixture
def one_rank():
    ringcomm.init()
    yield
    ringcomm.shutdown()


def test_a_state_of_parts_and_values(one_rank: None):
    layer, sent = Layer(1.0), []
    state: Any = parts.PartsState({"layer": part_of(layer, sent)}, epoch=3)
    assert state.layer is layer and state.epoch == 3
    state.epoch, layer.variables[0].number = 4, 9.0
    state.restore()
    assert (state.epoch, layer.variables[0].number) == (3, 1.0)
    state.epoch, layer.variables[0].number = 5, 2.0
    state.save()
    state.epoch, layer.variables[0].number = 6, 3.0
    state.restore()
    assert (state.epoch, layer.variables[0].number) == (5, 2.0)
    state.sync()
    assert sent == [layer.variables]


def test_a_model_that_is_not_built_cannot_be_saved():
    model: Any = Model()
    model.built = False
    with pytest.raises(ConfigError, match="must be built first"):
        parts.check_built(model, None)
