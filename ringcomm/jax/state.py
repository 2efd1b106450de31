"""Broadcast of training state: parameters, optimizer states, random keys."""

from __future__ import annotations

from typing import Any, List

import jax
import jax.numpy as jnp
import numpy as np

from .._adapter.objects import broadcast_object
from ..calls.process_set import ProcessSet, global_process_set
from ..docstrings import documented
from .collectives import broadcast, is_tracing


@documented
def broadcast_parameters(tree: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> Any:
    """Send the root's state to all ranks: parameters, optax states, ``nnx.State``, random keys.

    Example: ``params, opt_state = hvd.broadcast_parameters((params, opt_state))``.

    Args:
        tree: a pytree of the same structure on all ranks. Arrays have the same shapes and dtypes; other
            values (such as Python numbers) are pickled, outside of compiled programs only.
        {root_rank}
        {process_set}

    Returns:
        a new tree with the root's values. NumPy arrays stay NumPy arrays.

    Raises:
        {jax_errors}
    """
    leaves, structure = jax.tree_util.tree_flatten(tree)
    sent: List[Any] = []
    places: List[int] = []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
            places.append(place)
            sent.append(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
    others = [leaf for place, leaf in enumerate(leaves) if place not in set(places)]
    if others and not is_tracing():
        received = iter(broadcast_object(others, root_rank, process_set=process_set))
        leaves = [leaf if place in set(places) else next(received) for place, leaf in enumerate(leaves)]
    for place, result in zip(places, broadcast(sent, root_rank, process_set=process_set)):
        leaf = leaves[place]
        if _is_key(leaf):
            leaves[place] = jax.random.wrap_key_data(result, impl=jax.random.key_impl(leaf))
        elif isinstance(leaf, jax.Array) or is_tracing():
            leaves[place] = result
        else:
            leaves[place] = np.array(result)
    return jax.tree_util.tree_unflatten(structure, leaves)


def _is_key(leaf: Any) -> bool:
    """Return whether this is an array of typed random keys, which has no elements to send."""
    return isinstance(leaf, jax.Array) and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))
