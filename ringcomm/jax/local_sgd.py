"""Local steps for JAX: ranks train by themselves and average their parameters now and then."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Union

import jax
import jax.numpy as jnp
import numpy as np

from .._adapter.intervals import AUTO
from .._adapter.local_sgd import LocalSGD as Core
from .._adapter.local_sgd import host_dtype
from .._adapter.outer import OuterOptimizer
from ..calls.process_set import ProcessSet, global_process_set
from ..docstrings import documented
from ..dtypes import Array
from ..errors import ConfigError


@documented
class LocalSGD(OuterOptimizer):
    """Local steps on a pytree of parameters.

    Example::

        params = hvd.broadcast_parameters(params)
        local = hvd.LocalSGD(params)
        for batch in batches:
            params, opt_state = update(params, opt_state, batch)     # compiled; no collectives in it
            params = local.step(params)
        params = local.synchronize(params)

    This is another algorithm than averaging gradients; see :class:`ringcomm.LocalSGD`, whose arguments these
    are. The optimizer is the plain one of optax. All ranks must synchronize equally often.

    Args:
        params: a pytree of arrays, the same on all ranks. Leaves without floating-point numbers are left
            alone.
        {local_sgd}
        averaged: a pytree that is averaged at every synchronization, such as batch statistics. If it is
            given, :meth:`step` and :meth:`synchronize` take and return a pair: the parameters and this tree.
        name: of the operations; needed if a program has several.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(
        self,
        params: Any,
        sync_every: Union[int, str, Sequence[int]] = AUTO,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        compression: Any = None,
        averaged: Any = None,
        process_set: ProcessSet = global_process_set,
        fragments: int = 1,
        overlap: int = 0,
        max_drift: Optional[float] = None,
        name: str = "jax.local_sgd",
    ) -> None:
        self._has_averaged = averaged is not None
        self._structure = jax.tree_util.tree_structure((params, averaged))
        weights, means = (_host_arrays(tree) for tree in (params, averaged))
        self._arrays = [*weights, *means]
        leaves = jax.tree_util.tree_leaves((params, averaged))
        self._places = [place for place, leaf in enumerate(leaves) if _is_floating(leaf)]
        self._core = Core(
            weights, sync_every, outer_lr, outer_momentum, compression, means, process_set, name,
            fragments=fragments, overlap=overlap, max_drift=max_drift,
        )  # fmt: skip

    @property
    def core(self) -> Core:
        """The outer optimizer, on NumPy copies of the parameters; its ``state_dict()`` is for checkpoints."""
        return self._core

    def step(self, trees: Any) -> Any:
        """Count a local step, and synchronize if it is time; after every step of the local optimizer.

        Args:
            trees: the parameters; with ``averaged``, the pair of the parameters and that tree.

        Returns:
            the same with new values, or ``trees`` itself if nothing has changed.

        Raises:
            PeerLostError: a rank ended, or is silent for too long.
            ConfigError: the structure is not that of the parameters with which this object was made.
        """
        if not self._core.due():
            return trees
        touched = self._core.touched()
        leaves = self._read(trees, touched)
        self._core.advance()
        return self._written(leaves, touched)

    def synchronize(self, trees: Any) -> Any:
        """Average what the ranks have changed now. All ranks must call it, at the end for instance.

        Args:
            trees: as for :meth:`step`.

        Returns:
            the same with new values, equal on all ranks.

        Raises:
            PeerLostError: a rank ended, or is silent for too long.
            ConfigError: as for :meth:`step`.
        """
        everything = range(len(self._arrays))
        leaves = self._read(trees, everything)
        self._core.synchronize()
        return self._written(leaves, everything)

    def _read(self, trees: Any, numbers: Sequence[int]) -> List[Any]:
        pair = tuple(trees) if self._has_averaged else (trees, None)
        leaves: List[Any]
        leaves, structure = jax.tree_util.tree_flatten(pair)
        if structure != self._structure:
            raise ConfigError(
                f"LocalSGD was made for parameters of the structure {self._structure}, and is given "
                f"{structure}."
            )
        for number in numbers:
            self._arrays[number][...] = np.asarray(leaves[self._places[number]], self._arrays[number].dtype)
        return leaves

    def _written(self, leaves: List[Any], numbers: Sequence[int]) -> Any:
        for number in numbers:
            old = leaves[self._places[number]]
            new = jnp.asarray(self._arrays[number].copy(), jnp.asarray(old).dtype)
            leaves[self._places[number]] = jax.device_put(new, getattr(old, "sharding", None))
        params, averaged = jax.tree_util.tree_unflatten(self._structure, leaves)
        return (params, averaged) if self._has_averaged else params


def _is_floating(leaf: Any) -> bool:
    return bool(jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.inexact))


def _host_arrays(tree: Any) -> List[Array]:
    """NumPy copies of the leaves with floating-point numbers; float32 for half types."""
    leaves = [jnp.asarray(leaf) for leaf in jax.tree_util.tree_leaves(tree) if _is_floating(leaf)]
    return [np.array(leaf, host_dtype(leaf.dtype.name)) for leaf in leaves]
