"""Classes of distributed optimizers and tapes, derived from the user's own.

Each distributed Keras optimizer has a class of its own, in which ``from_config()`` finds its options.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Optional, Tuple


class OptionsInClass:
    """Mixin for the classes that :func:`derive` makes."""

    _ringcomm_options: Optional[Tuple[Any, ...]] = None

    def _take_options(self, *options: Any) -> None:
        """Make an optimizer reduce gradients as the options say, without local variables."""
        raise NotImplementedError

    @classmethod
    def from_config(cls, config: Any, *args: Any, **kwargs: Any) -> Any:
        """Create an optimizer of the same class, which reduces gradients in the same way.

        Args:
            config: from the optimizer's ``get_config()``.
            args: further arguments of the optimizer's own method.
            kwargs: the same, passed by keyword.

        Returns:
            the optimizer, without the state and the local variables of the other one.
        """
        made = super().from_config(config, *args, **kwargs)  # type: ignore[misc]
        if cls._ringcomm_options is not None:
            made._take_options(*cls._ringcomm_options)
        return made


def derive(bases: Tuple[type, ...], options: Tuple[Any, ...]) -> Any:
    """A class with these options. It has the name of the last base, which a saved model then names.

    Args:
        bases: of the class; the first is, or is derived from, :class:`OptionsInClass`.
        options: the arguments of its ``_take_options``.
    """
    named = bases[-1]
    namespace = {"__doc__": named.__doc__, "__module__": named.__module__, "_ringcomm_options": options}
    return type(named.__name__, bases, namespace)


def wrapped(mixin: type, thing: Any, but: str = "") -> Any:
    """Return an object with the attributes of another one (``but`` one), of a class derived from both.

    Args:
        mixin: the first base of the class.
        thing: the other object, whose class is the second base.
        but: the name of an attribute that it does not get: a scheduler may have set ``step`` on the original.
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
    """Make an existing optimizer one of a class of :func:`derive`; it keeps its state.

    Args:
        optimizer: the optimizer.
        kind: the class, derived from the optimizer's own.
    """
    optimizer.__class__ = kind
    optimizer._take_options(*kind._ringcomm_options)
    return optimizer


def set_untracked(optimizer: Any, name: str, value: Any) -> None:
    """Set an attribute that Keras is not to track, because it would save it with the model."""
    object.__setattr__(optimizer, name, value)
