"""Helper functions that programs written for Horovod import."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def vars_to_refs(vars: Any) -> Any:  # noqa: A002 - Horovod's name
    """Convert a variable, or nested lists of variables, to hashable references.

    Args:
        vars: a ``tf.Variable``, or a list of such or of further lists.

    Returns:
        for a variable its ``ref()``, for a list a tuple of the converted items.
    """
    return tuple(map(vars_to_refs, vars)) if isinstance(vars, list) else vars.ref()


def refs_to_vars(refs: Any) -> Any:
    """Convert references back to variables: the inverse of :func:`vars_to_refs`.

    Args:
        refs: a reference, or a tuple of such or of further tuples.

    Returns:
        for a reference its variable, for a tuple a list of the converted items.
    """
    return list(map(refs_to_vars, refs)) if isinstance(refs, tuple) else refs.deref()


def _executing_eagerly() -> bool:
    """Return whether TensorFlow is in eager mode."""
    return bool(tf.executing_eagerly())
