"""Classes of distributed optimizers and tapes, derived from the user's own.

Each distributed Keras optimizer has its own class, in which ``from_config()`` finds its options.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Optional, Tuple


class OptionsInClass:
    """Mixin for the classes that :func:`derive` makes."""

    _ringcomm_options: Optional[Tuple[Any, ...]] = None

    def _take_options(self, *options: Any) -> None:
        """Make an optimizer reduce gradients by the options, without local variables."""
        raise NotImplementedError

    @classmethod
    def from_config(cls, config: Any, *args: Any, **kwargs: Any) -> Any:
        """Create an optimizer of the same class, which reduces gradients in the same way.

        It has neither the state nor the local variables of the other one.
        """
        made = super().from_config(config, *args, **kwargs)  # type: ignore[misc]
        if cls._ringcomm_options is not None:
            made._take_options(*cls._ringcomm_options)
        return made


def derive(bases: Tuple[type, ...], options: Tuple[Any, ...]) -> Any:
    """Return a class with these options and the name of the last base, which a saved model then names.

    The first base derives from :class:`OptionsInClass`; ``options`` are arguments of ``_take_options``.
    """
    named = bases[-1]
    namespace = {"__doc__": named.__doc__, "__module__": named.__module__, "_ringcomm_options": options}
    return type(named.__name__, bases, namespace)


def wrapped(mixin: type, thing: Any, but: str = "") -> Any:
    """Return an object with the attributes of ``thing``, of a class derived from ``mixin`` and its class.

    It does not get the attribute ``but``: a scheduler may have set ``step`` on the original.
    """
    own: Any = type(thing)
    made: Any = object.__new__(_class_with(mixin, own))
    made.__dict__.update(thing.__dict__)
    made.__dict__.pop(but, None)
    return made


@lru_cache(maxsize=None)
def _class_with(mixin: type, own: type) -> type:
    return type(own.__name__, (mixin, own), {"__doc__": own.__doc__})


def convert(optimizer: Any, kind: Any) -> Any:
    """Make an existing optimizer one of a class of :func:`derive`; it keeps its state."""
    optimizer.__class__ = kind
    optimizer._take_options(*kind._ringcomm_options)
    return optimizer


def set_untracked(optimizer: Any, name: str, value: Any) -> None:
    """Set an attribute that Keras must not track, because it would save it with the model."""
    object.__setattr__(optimizer, name, value)
