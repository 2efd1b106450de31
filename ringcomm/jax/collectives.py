"""The public collectives on pytrees of JAX arrays, inside and outside of compiled programs.

Also ``jax.distributed.initialize()`` without arguments, in a job of ``ringrun``: JAX asks every class derived
from its ``ClusterEnv`` whether it can describe the processes of the job. That class has no public name; if it
is missing, ``initialize()`` needs its arguments.
"""

from __future__ import annotations

import socket
from typing import Any, Callable, List, Optional, Sequence, Tuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import api
from .._adapter.graph_callbacks import Operation, TreeCollectives
from .._adapter.reduction import Reduction
from .._adapter.submit import broadcast_object
from ..calls.process_set import ProcessSet, global_process_set, size_of
from ..collective.observe import look_through, this_site
from ..collective.options import Options, takes
from ..collective.rows import row_counts
from ..config import Membership, torchrun_from_environment
from ..docstrings import documented
from ..errors import NotOfferedError, RingcommError
from ..ops import ReduceOp
from .programs import HostCall, bind, from_host, rows_of, run_outside, to_host, weights_of

try:
    from jax._src.clusters import ClusterEnv
except ImportError:  # pragma: no cover - where JAX has moved the name, which is not public
    ClusterEnv = object

__all__ = [
    "allgather", "allreduce", "alltoall", "barrier", "broadcast", "broadcast_parameters", "pmean", "psum",
    "reducescatter",
]  # fmt: skip

look_through(jax)


@takes("allreduce", "op name compression prescale_factor postscale_factor process_set", "jax")
def allreduce(tree: Any, options: Options) -> Any:
    """Reduce all arrays of a tree over all ranks, in one operation; every rank gets the results.

    Example: ``loss = hvd.allreduce(loss)``, inside or outside of ``jax.jit``.

    Args:
        {jax_tree}
        {options}

    Returns:
        a new tree of the input's structure, shapes and dtypes, bit-identical on all ranks. Average and Sum
        without weights are differentiable; the gradient is the same reduction of all gradients.

    Raises:
        UnsupportedDtypeError: the op does not support the dtype.
        {jax_errors}
    """
    return _trees.allreduce(tree, options)


@documented
def psum(tree: Any, process_set: ProcessSet = global_process_set) -> Any:
    """Add the arrays of all ranks: ``allreduce(tree, op=Sum)``, named as in ``jax.lax``.

    Args:
        {jax_tree}
        {process_set}

    Returns:
        a new tree of sums.

    Raises:
        {jax_errors}
    """
    return allreduce(tree, ReduceOp.SUM, process_set=process_set)


@documented
def pmean(tree: Any, process_set: ProcessSet = global_process_set) -> Any:
    """Average the arrays of all ranks: ``allreduce(tree)``, named as in ``jax.lax``.

    Args:
        {jax_tree}
        {process_set}

    Returns:
        a new tree of averages.

    Raises:
        {jax_errors}
    """
    return allreduce(tree, ReduceOp.AVERAGE, process_set=process_set)


@documented
def allgather(tree: Any, name: Optional[str] = None, process_set: ProcessSet = global_process_set) -> Any:
    """Concatenate the arrays of all ranks along their first dimension, in rank order.

    Args:
        tree: a pytree of arrays with at least one dimension. In compiled programs, shapes must be equal on
            all ranks. Elsewhere the first dimensions may differ.
        {jax_matching}

    Returns:
        a new tree, the same on all ranks. It is differentiable if shapes are equal; the gradient consists of
        this rank's rows of the averaged gradients.

    Raises:
        ShapeError: an array has no dimensions.
        {jax_errors}
    """
    return _trees.allgather(tree, name, process_set)


@documented
def broadcast(
    tree: Any, root_rank: int = 0, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send the root's arrays to all ranks.

    Args:
        {jax_tree}
        {root_rank}
        {jax_matching}

    Returns:
        a new tree with the root's values. It is differentiable: the root gets the averaged gradients, all
        other ranks get zeros.

    Raises:
        {jax_errors}
    """
    return _trees.broadcast(tree, root_rank, name, process_set)


@takes("reducescatter", "op name process_set prescale_factor postscale_factor", "jax")
def reducescatter(tree: Any, options: Options) -> Any:
    """Reduce all arrays of a tree over all ranks; every rank gets its part of the rows.

    Rows are divided evenly. If r rows remain, the first r ranks get one row more.

    Args:
        tree: a pytree of arrays with at least one dimension, of the same structure, shapes and dtypes on all
            ranks.
        {options}

    Returns:
        a new tree with this rank's rows. With Average and Sum it is differentiable.

    Raises:
        NotOfferedError: the op is Adasum.
        ShapeError: an array has no dimensions.
        {jax_errors}
    """
    return _trees.reducescatter(tree, options)


@documented
def alltoall(
    x: Any, splits: Optional[Sequence[int]] = None, name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> Any:  # fmt: skip
    """Send rows of an array to every rank, and receive rows from every rank.

    Args:
        x: an array with at least one dimension.
        {splits}
            Use it only outside of compiled programs, in which shapes cannot depend on other ranks.
        {jax_matching}

    Returns:
        the received rows in rank order. With ``splits``, a pair: the received rows, and their number from
        each rank (int32). Without ``splits`` it is differentiable; the gradient is the alltoall of the
        gradients.

    Raises:
        ConfigError: the splits do not match the rows or the ranks.
        NotOfferedError: there are splits in a compiled program.
        ShapeError: the array has no dimensions.
        {jax_errors}
    """
    array = jnp.asarray(x)
    rows = rows_of("alltoall", array.shape)
    operation = Operation("alltoall", Reduction(process_set=process_set), name, 2)
    if splits is None:
        row_counts(rows, None, size_of(process_set))
        (result,) = bind(operation, [array])
        return result
    if isinstance(array, jax.core.Tracer) or is_tracing():
        raise NotOfferedError(
            "alltoall with splits inside jit or grad: the number of rows received is not known when the "
            "program is compiled. Call it outside, or pad to equal numbers and leave splits out."
        )
    given = [to_host(array, copy=False), np.asarray(list(splits))]
    received, counts = run_outside(HostCall(operation, None, this_site()), given)
    return from_host(received, array), jnp.asarray(counts)


@documented
def barrier(process_set: ProcessSet = global_process_set, name: Optional[str] = None) -> None:
    """Wait until all ranks have called this. In a compiled program it runs in the order of collectives.

    Args:
        {process_set}
        {jax_name}

    Raises:
        {jax_errors}
    """
    bind(Operation("barrier", Reduction(process_set=process_set), name, 0), [])


@documented
def broadcast_parameters(tree: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> Any:
    """Send the root's state to all ranks: parameters, optax states, ``nnx.State``, random keys.

    Example: ``params, opt_state = hvd.broadcast_parameters((params, opt_state))``.

    Args:
        tree: a pytree of the same structure on all ranks. Arrays have the same shapes and dtypes; other
            values (such as Python numbers) are pickled, which works only outside of compiled programs.
        {root_rank}
        {process_set}

    Returns:
        a new tree with the root's values. NumPy arrays stay NumPy arrays.

    Raises:
        {jax_errors}
    """
    leaves, structure = jax.tree_util.tree_flatten(tree)
    places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray, np.generic))]
    others = [n for n in range(len(leaves)) if n not in set(places)]
    if others and not is_tracing():
        received = broadcast_object([leaves[n] for n in others], root_rank, process_set=process_set)
        for n, value in zip(others, received):
            leaves[n] = value
    sent = [jax.random.key_data(leaves[n]) if _is_key(leaves[n]) else leaves[n] for n in places]
    for n, result in zip(places, broadcast(sent, root_rank, process_set=process_set)):
        if _is_key(leaves[n]):
            result = jax.random.wrap_key_data(result, impl=jax.random.key_impl(leaves[n]))
        leaves[n] = result if isinstance(leaves[n], jax.Array) or is_tracing() else np.array(result)
    return jax.tree_util.tree_unflatten(structure, leaves)


def _is_key(leaf: Any) -> bool:
    """Return whether this is an array of typed random keys, which has no elements to send."""
    return isinstance(leaf, jax.Array) and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def is_tracing() -> bool:
    """Return whether JAX is tracing a program in this thread, so that even constants are part of it."""
    return isinstance(jnp.add(0, 0), jax.core.Tracer)


def _leaves(tree: Any) -> Tuple[List[Any], Callable[[Sequence[Any]], Any]]:
    leaves, structure = jax.tree_util.tree_flatten(tree)
    return [jnp.asarray(leaf) for leaf in leaves], structure.unflatten


_trees = TreeCollectives(_leaves, bind, weights_of)


# ---- jax.distributed ----------------------------------------------------------------------------


class RingcommCluster(ClusterEnv):
    """Describe the ranks of this job to ``jax.distributed``."""

    name = "ringcomm"

    @classmethod
    def is_env_present(cls) -> bool:
        """Return whether this process is in a job of more than one rank, or is about to join one."""
        if api.is_initialized():
            return api.size() > 1
        try:
            return Membership.from_environment().size > 1
        except RingcommError:
            return False

    @classmethod
    def get_coordinator_address(cls, timeout_secs: Optional[int] = None, *args: Any, **kwargs: Any) -> str:
        """Return an address of rank 0 with a free port, the same on all ranks; join the job if needed."""
        api.init()
        found = None
        if api.rank() == 0:
            host = torchrun_from_environment(api.size())[1] or socket.gethostname()
            with socket.socket() as probe:
                probe.bind(("", 0))
                found = f"{host}:{probe.getsockname()[1]}"
        return broadcast_object(found, 0)

    @classmethod
    def get_process_count(cls) -> int:
        """Return the number of ranks."""
        return api.size()

    @classmethod
    def get_process_id(cls) -> int:
        """Return this process's rank."""
        return api.rank()

    @classmethod
    def get_local_process_id(cls) -> Optional[int]:
        """Return None: JAX must not restrict a rank to one of its devices."""
        return None


if ClusterEnv is not object:  # pragma: no branch - as above
    # Before the others: within an allocation of Slurm, its variables do not describe ringrun's ranks.
    ClusterEnv._cluster_types.remove(RingcommCluster)
    ClusterEnv._cluster_types.insert(0, RingcommCluster)
