"""Helper functions that programs written for Horovod import."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def vars_to_refs(vars: Any) -> Any:  # noqa: A002 - Horovod's name
    """Convert a variable to its ``ref()``, and nested lists of variables to tuples of them."""
    return tuple(map(vars_to_refs, vars)) if isinstance(vars, list) else vars.ref()


def refs_to_vars(refs: Any) -> Any:
    """Convert references back to variables: the inverse of :func:`vars_to_refs`."""
    return list(map(refs_to_vars, refs)) if isinstance(refs, tuple) else refs.deref()


def _executing_eagerly() -> bool:
    """Return whether TensorFlow is in eager mode."""
    return bool(tf.executing_eagerly())
