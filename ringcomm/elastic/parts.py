"""Elastic states made of parts, each with its own way to save, restore and synchronize."""

from __future__ import annotations

import copy
from typing import Any, Callable, Dict, List, Optional, Sequence

from .._adapter.objects import broadcast_object
from ..errors import ConfigError
from .samples import ElasticSampler
from .state import ObjectState


class StatePart:
    """A member of a state that saves, restores and synchronizes its object, such as a model."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Save the object's present state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the object's saved state."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give the object of every rank the state of rank 0's, then save it."""
        raise NotImplementedError

    def reset(self) -> None:
        """Prepare the object for other ranks, before :meth:`sync`. Does nothing by default."""

    def set_value(self, value: Any) -> None:
        """Replace the object and save the state of the new one."""
        self.value = value
        self.save()


class DictPart(StatePart):
    """A part whose object has ``state_dict()`` and ``load_state_dict()``.

    ``send`` gives every rank the state of rank 0's object; None: broadcast its ``state_dict()`` as an object.
    """

    def __init__(self, value: Any, send: Optional[Callable[[Any], None]] = None) -> None:
        super().__init__(value)
        self._send = send
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        # A copy: the object may use the loaded tensors themselves, which training changes in place.
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        if self._send is None:
            self.value.load_state_dict(broadcast_object(self.value.state_dict()))
        else:
            self._send(self.value)
        self.save()


class SamplerPart(DictPart):
    """A part for a sampler, which distributes samples again when ranks change, also if no state is sent."""

    def reset(self) -> None:
        self.value.reset()


class PartsState(ObjectState):
    """Elastic state of parts and plain Python values, each an attribute of the state.

    Args:
        parts: the parts by the names of their attributes.
        kwargs: initial values of further attributes, which must be picklable, or samplers.
    """

    def __init__(self, parts: Dict[str, StatePart], **kwargs: Any) -> None:
        parts = dict(parts)
        for name, value in list(kwargs.items()):
            if isinstance(value, ElasticSampler):
                parts[name] = SamplerPart(kwargs.pop(name))
        self._handlers = parts
        for name, part in parts.items():
            super().__setattr__(name, part.value)
        super().__init__(**kwargs)

    def save(self) -> None:
        """Save all parts and values in memory."""
        for part in self._handlers.values():
            part.save()
        super().save()

    def restore(self) -> None:
        """Restore all parts and values from the last save."""
        for part in self._handlers.values():
            part.restore()
        super().restore()

    def sync(self) -> None:
        """Broadcast all parts and values from rank 0 to all ranks, then save them.

        Raises:
            PeerLostError: a rank was lost.
        """
        for part in self._handlers.values():
            part.sync()
        super().sync()

    def reset(self) -> None:
        """Prepare all parts for other ranks."""
        for part in self._handlers.values():
            part.reset()
        super().reset()

    def __setattr__(self, name: str, value: Any) -> None:
        part = self.__dict__.get("_handlers", {}).get(name)
        if part is not None:
            part.set_value(value)
        super().__setattr__(name, value)


class VariablesPart(StatePart):
    """Save the values of a framework's variables.

    ``value`` is a model, an optimizer, or a list of variables; ``read`` copies values, ``assign`` sets them,
    and ``send`` sets rank 0's on all ranks.
    """

    def __init__(
        self,
        value: Any,
        read: Callable[[List[Any]], Sequence[Any]],
        assign: Callable[[List[Any], Sequence[Any]], Any],
        send: Callable[[List[Any]], Any],
    ) -> None:
        super().__init__(value)
        self._read, self._assign, self._send = read, assign, send
        self.save()

    def save(self) -> None:
        self._saved = self._read(variables_of(self.value))

    def restore(self) -> None:
        # Variables created after the save keep their values.
        self._assign(variables_of(self.value)[: len(self._saved)], self._saved)

    def sync(self) -> None:
        self._send(variables_of(self.value))
        self.save()


def variables_of(thing: Any) -> List[Any]:
    """Return the variables of a model or an optimizer (in older versions ``variables`` is a method)."""
    listed = getattr(thing, "variables", thing)
    return list(listed() if callable(listed) else listed)


def check_built(model: Any, optimizer: Any) -> Any:
    """Return the optimizer (None: the compiled one) after creating its variables, so that they can be saved.

    ConfigError: the model is not built, so its variables do not exist yet.
    """
    if not getattr(model, "built", True):
        raise ConfigError("The model must be built first: model.build(input_shape), or call it once.")
    chosen = getattr(model, "optimizer", None) if optimizer is None else optimizer
    if chosen is not None:
        build(chosen, model)
    return chosen


def build(optimizer: Any, model: Any) -> None:
    """Create an optimizer's variables if it has a method for it and has not done so."""
    if not getattr(optimizer, "built", getattr(optimizer, "_built", True)):
        optimizer.build(model.trainable_variables)
