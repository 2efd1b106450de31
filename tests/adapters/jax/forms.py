"""What the checks of ringcomm.jax share: each holds outside of compiled programs and in them."""

from __future__ import annotations

import os
from typing import Any, Callable, List

import jax
import jax.numpy as jnp
import numpy as np

import ringcomm as rc
import ringcomm.jax as hvd

JIT: Any = {"jax": jax.jit, "hvd": hvd.jit}[os.environ.get("TEST_JIT", "jax")]
FORMS: List[Callable[[Any], Any]] = [lambda function: function, JIT]


def mode_of(form: Callable[[Any], Any]) -> Any:
    """Return the form as a mode of :mod:`tests.adapters.contract`."""
    return lambda function, arrays: [np.asarray(item) for item in form(function)(*map(jnp.asarray, arrays))]


def ranks(value: Callable[[int], Any]) -> List[Any]:
    """A value of every rank, computed here."""
    return [np.asarray(value(rank)) for rank in range(rc.size())]


def same(found: Any, expected: Any, exact: float = 1e-5) -> None:
    """The trees have the same structure, shapes and, up to rounding, numbers."""
    assert jax.tree_util.tree_structure(found) == jax.tree_util.tree_structure(expected)
    for mine, right in zip(jax.tree_util.tree_leaves(found), jax.tree_util.tree_leaves(expected)):
        assert np.shape(mine) == np.shape(right), (np.shape(mine), np.shape(right))
        np.testing.assert_allclose(
            np.asarray(mine, np.float64), np.asarray(right, np.float64), rtol=exact, atol=exact
        )
