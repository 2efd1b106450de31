"""Small helpers that programs written for Horovod import."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def vars_to_refs(vars: Any) -> Any:  # noqa: A002 - Horovod's name
    """Variables as keys of dictionaries: a list becomes a tuple of references, however deep."""
    return tuple(map(vars_to_refs, vars)) if isinstance(vars, list) else vars.ref()


def refs_to_vars(refs: Any) -> Any:
    """The variables that :func:`vars_to_refs` was given."""
    return list(map(refs_to_vars, refs)) if isinstance(refs, tuple) else refs.deref()


def _executing_eagerly() -> bool:
    """Whether operations run at once, outside of any graph."""
    return bool(tf.executing_eagerly())
