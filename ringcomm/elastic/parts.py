"""States that consist of parts, each of which is kept and made the same in its own way."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Sequence

from ..errors import ConfigError
from .state import ObjectState, Part


class PartsState(ObjectState):
    """Parts, and plain values besides: all are attributes.

    Args:
        parts: by the names of the attributes.
        kwargs: plain values.
    """

    def __init__(self, parts: Dict[str, Part], **kwargs: Any) -> None:
        self._handlers = parts
        for name, part in parts.items():
            super().__setattr__(name, part.value)
        super().__init__(**kwargs)

    def save(self) -> None:
        """Keep everything in memory."""
        for part in self._handlers.values():
            part.save()
        super().save()

    def restore(self) -> None:
        """Go back to what was kept last."""
        for part in self._handlers.values():
            part.restore()
        super().restore()

    def sync(self) -> None:
        """Give all ranks what rank 0 has, and keep it."""
        for part in self._handlers.values():
            part.sync()
        super().sync()

    def __setattr__(self, name: str, value: Any) -> None:
        part = self.__dict__.get("_handlers", {}).get(name)
        if part is not None:
            part.set_value(value)
        super().__setattr__(name, value)


class VariablesPart(Part):
    """Something with variables of a framework: their values are what is kept.

    Args:
        value: a model, an optimizer, or a list of variables.
        read: copies of the values of some variables.
        assign: gives some variables some values.
        send: gives some variables the values that they have on rank 0.
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
        """See :meth:`Part.save`."""
        self._saved = self._read(self._variables())

    def restore(self) -> None:
        """See :meth:`Part.restore`. Variables that were not there yet stay what they are."""
        self._assign(self._variables()[: len(self._saved)], self._saved)

    def sync(self) -> None:
        """See :meth:`Part.sync`."""
        self._send(self._variables())
        self.save()

    def _variables(self) -> List[Any]:
        return variables_of(self.value)


def variables_of(thing: Any) -> List[Any]:
    """The variables of a model or an optimizer, be they an attribute or, as once, a method's result."""
    listed = getattr(thing, "variables", thing)
    return list(listed() if callable(listed) else listed)


def check_built(model: Any, optimizer: Any) -> Any:
    """A model's optimizer, with all its variables made, so that there is something to keep.

    Args:
        optimizer: if the model was not compiled with one.

    Raises:
        ConfigError: the model's shapes are not known yet.
    """
    if not getattr(model, "built", True):
        raise ConfigError("The model must be built first: model.build(input_shape), or call it once.")
    chosen = getattr(model, "optimizer", None) if optimizer is None else optimizer
    if chosen is not None:
        build(chosen, model)
    return chosen


def build(optimizer: Any, model: Any) -> None:
    """Make an optimizer's variables, if they are not there yet and it can."""
    if not getattr(optimizer, "built", getattr(optimizer, "_built", True)):
        optimizer.build(model.trainable_variables)
