"""Classes of distributed Keras optimizers, on a stand-in for an optimizer of Keras."""

from __future__ import annotations

from ringcomm._adapter.optimizer_classes import OptionsInClass, convert, derive, wrapped


class Optimizer:
    """Descends."""

    def __init__(self, rate):
        self.rate = rate

    @classmethod
    def from_config(cls, config, custom_objects=None):
        assert custom_objects in (None, "given")
        return cls(**config)

    def get_config(self):
        return {"rate": self.rate}


class Reducing(OptionsInClass):
    taken = ()

    def _take_options(self, *options):
        self.taken = options


def test_a_class_has_the_name_and_the_text_of_the_optimizers_own():
    kind = derive((Reducing, Optimizer), ("Average", 2))
    assert (kind.__name__, kind.__module__, kind.__doc__) == ("Optimizer", __name__, "Descends.")
    assert issubclass(kind, Optimizer) and kind is not Optimizer


def test_what_is_made_from_a_configuration_reduces_in_the_same_way():
    kinds = [derive((Reducing, Optimizer), options) for options in (("Average",), ("Sum", 3))]
    made = [kind.from_config({"rate": 0.5}, custom_objects="given") for kind in kinds]
    assert [item.taken for item in made] == [("Average",), ("Sum", 3)]
    again = type(made[1]).from_config(made[1].get_config())
    assert (again.rate, again.taken) == (0.5, ("Sum", 3))


def test_an_existing_optimizer_keeps_its_state():
    optimizer = Optimizer(0.5)
    optimizer.momenta = [1.0]
    kind = derive((Reducing, Optimizer), ("Sum", 3))
    assert convert(optimizer, kind) is optimizer
    assert type(optimizer) is kind and optimizer.taken == ("Sum", 3)
    assert (optimizer.rate, optimizer.momenta) == (0.5, [1.0])


def test_what_is_wrapped_has_the_attributes_of_its_original():
    original = Optimizer(0.5)
    original.step = "replaced"
    made, other = wrapped(Reducing, original, but="step"), wrapped(Reducing, original)
    assert isinstance(made, Reducing) and isinstance(made, Optimizer) and type(made) is type(other)
    assert (made.rate, type(made).__name__, type(made).__doc__) == (0.5, "Optimizer", "Descends.")
    assert not hasattr(made, "step") and other.step == original.step == "replaced"
