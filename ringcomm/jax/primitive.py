"""The JAX primitive of every collective: how it is compiled, executed, differentiated and vectorized.

**Gradients** follow Horovod, as in the other adapters: the gradient of a sum is the sum of the ranks'
gradients, that of an average their average, that of an allgather this rank's rows of the averaged gradients.
"""

from __future__ import annotations

import inspect
import threading
from typing import Any, Dict, List, Optional, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .. import api
from .._adapter.graph_callbacks import Operation
from .._adapter.reduction import Reduction
from .._adapter.submit import with_causes
from ..collective.observe import this_site
from ..errors import NotOfferedError
from ..ops import ReduceOp, weight_of
from .host_call import HostCall, SetPosition, edges_of, place_for, results_of

collective_p = Primitive("ringcomm_collective")
collective_p.multiple_results = True


def _effect() -> Any:
    """Return the effect by which ``io_callback`` keeps its order; its class has no public name."""
    (found,) = jax.make_jaxpr(lambda: io_callback(lambda: None, None, ordered=True))().effects
    try:
        from jax._src.effects import remat_allowed_effects

        # Otherwise jax.checkpoint refuses functions with collectives.
        remat_allowed_effects.add_type(type(found))
    except (ImportError, AttributeError):  # pragma: no cover - where JAX has moved the name
        pass
    return found


effect = _effect()


def bind(operation: Operation, operands: Sequence[Any]) -> List[Any]:
    """Add a collective to the traced program, or execute it if none is traced; return its results.

    NotInitializedError: this process is not in a job. UnknownProcessSetError: the set is not registered, or
    this rank is not a member. ShapeError: an operand has no dimensions, and the operation needs rows.
    """
    call = HostCall(operation, place_for(operation), this_site())
    results_of(call, [operand.shape for operand in operands])
    results: List[Any] = collective_p.bind(*operands, call=call)
    return results


@collective_p.def_effectful_abstract_eval
def _abstract(*operands: Any, call: HostCall) -> Any:
    shapes = results_of(call, [operand.shape for operand in operands])
    results = [jax.core.ShapedArray(tuple(shape), operand.dtype) for shape, operand in zip(shapes, operands)]
    return results, {effect}


def _lower(ctx: Any, *operands: Any, call: HostCall) -> Sequence[Any]:
    """Emit the call of the host into a program, for every kind of device, as ``io_callback`` does.

    That would make JAX arrays of the operands inside the callback; with one thread of XLA, converting these
    to NumPy waits for ever for that thread.
    """

    def on_host(*arrays: Any) -> Any:
        return tuple(call.run([np.asarray(array) for array in arrays]))

    results, token, _ = mlir.emit_python_callback(
        ctx, on_host, ctx.tokens_in.get(effect), list(operands), ctx.avals_in, ctx.avals_out,
        has_side_effect=True, returns_token=True,
    )  # fmt: skip
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({effect: token})))
    return list(results)


_has_cache = "cacheable" in inspect.signature(mlir.register_lowering).parameters
# Options of a lowering that must not be cached. Older versions of JAX cache none and have no such option.
uncached: Dict[str, Any] = {"cacheable": False} if _has_cache else {}

# Not cached: a program that contains the operation twice calls the host at two places.
mlir.register_lowering(collective_p, _lower, **uncached)


@collective_p.def_impl
def _execute(*operands: Any, call: HostCall) -> List[Any]:
    results = run_outside(call, [to_host(operand, copy=call.overwrites) for operand in operands])
    return [from_host(result, operand) for result, operand in zip(results, operands)]


def run_outside(call: HostCall, arrays: Sequence[Any]) -> List[Any]:
    """Execute a call on the host, after the programs that this thread has started.

    Arrays as for :meth:`.HostCall.run_now`. RingcommError (or an error of JAX): it failed, or one of the
    programs has.
    """
    with with_causes():
        wait_for_programs()
    return call.run_now(arrays)


class _Latest(threading.local):
    """The program of ``hvd.jit`` that a thread has started last."""

    done: Any = None  # a result of it that nothing else uses


latest = _Latest()


def wait_for_programs() -> None:
    """Wait for this thread's programs of ``hvd.jit`` and ``jax.jit``; raise JAX's error if one failed."""
    done, latest.done = latest.done, None
    if done is not None:
        jax.block_until_ready(done)
    jax.effects_barrier()


ALIGNMENT = 64  # JAX takes over memory without a copy if its address is a multiple of this

_SHARED_FROM_BYTES = 4096  # below this a copy takes less time than handing memory over


def to_host(operand: Any, copy: bool) -> Any:
    """Return a JAX array as a contiguous NumPy array; with ``copy`` in new, writable memory."""
    array = np.asarray(operand)
    if not copy:
        return np.asarray(array, order="C")  # np.ascontiguousarray() makes a row of a scalar
    own = aligned(array.shape, array.dtype)
    np.copyto(own, array)
    return own


def aligned(shape: Any, dtype: Any) -> Any:
    """Return an uninitialized array whose memory JAX can take over."""
    kind = np.dtype(dtype)
    nbytes = int(np.prod(shape)) * kind.itemsize
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes].view(kind).reshape(shape)


def from_host(array: Any, like: Any) -> Any:
    """Return a JAX array with the elements of a NumPy array, on the device of ``like``.

    The NumPy array must not be written to after this.
    """
    share = array.nbytes >= _SHARED_FROM_BYTES and array.dtype.kind in "iufc"
    result = jnp.from_dlpack(array) if share else jnp.asarray(array)
    device = getattr(like, "sharding", None)
    on_accelerator = device is not None and next(iter(device.device_set)).platform != "cpu"
    if on_accelerator:  # pragma: no cover - needs a GPU or a TPU
        return jax.device_put(result, device)
    return result


# ---- derivatives -----------------------------------------------------------------------------


def weights_of(weight: Any) -> List[Any]:
    """Return the weight as the last operand of a reduction; none if it is None.

    Misuse: it is a number, and negative or not finite.
    """
    if weight is None:
        return []
    if not isinstance(weight, jax.core.Tracer):
        weight_of(weight)
    return [jnp.asarray(weight, jnp.float32)]


def _linear(operation: Operation) -> bool:
    # What a single reduction loses by its codes is taken for noise: the gradient is that of the reduction.
    return operation.how.adds and not operation.has_weight and operation.state is None


def _differentiate(primals: Sequence[Any], tangents: Sequence[Any], *, call: HostCall) -> Any:
    """Return the derivative in a direction: the same operation on the tangents."""
    results = collective_p.bind(*primals, call=call)
    given = [index for index, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]
    derived: List[Any] = [ad.Zero(jax.typeof(result).to_tangent_aval()) for result in results]
    if given:
        if not _linear(call.operation):
            raise NotOfferedError(
                f"{call.operation.kind} has a gradient for Sum and Average only, without "
                "weights and error feedback."
            )
        used = _for_inputs(call, len(given))
        for index, item in zip(given, collective_p.bind(*(tangents[index] for index in given), call=used)):
            derived[index] = item
    return results, derived


def _for_inputs(call: HostCall, inputs: int) -> HostCall:
    """Return the call for another number of arrays; of an alltoall's two inputs one is the splits."""
    if call.operation.kind == "alltoall":
        return call
    return call._replace(operation=call.operation._replace(inputs=inputs))


def _transpose(cotangents: Sequence[Any], *operands: Any, call: HostCall) -> List[Any]:
    """Return the gradients of the operands from those of the results."""
    found: List[Any] = [
        ad.Zero(operand.aval) if ad.is_undefined_primal(operand) else None for operand in operands
    ]
    wanted = [
        index
        for index, (operand, cotangent) in enumerate(zip(operands, cotangents))
        if ad.is_undefined_primal(operand) and type(cotangent) is not ad.Zero
    ]
    if wanted:
        shapes = [operands[index].aval.shape for index in wanted]
        gradients = _gradients(call, [cotangents[index] for index in wanted], shapes)
        for index, gradient in zip(wanted, gradients):
            found[index] = gradient
    return found


def _gradients(call: HostCall, cotangents: List[Any], shapes: Sequence[Sequence[int]]) -> List[Any]:
    operation, place, count = call.operation, call.place, len(cotangents)
    if operation.kind in ("allreduce", "alltoall"):
        return list(collective_p.bind(*cotangents, call=_for_inputs(call, count)))
    mean = Reduction(process_set=operation.how.process_set)
    averaged = Operation("allreduce", mean, operation.name, count)
    if operation.kind == "broadcast":
        means = bind(averaged, cotangents)
        own = api.rank() == operation.root_rank
        return means if own else [jnp.zeros_like(mean) for mean in means]
    assert place is not None
    if operation.kind == "allgather":
        means = bind(averaged, cotangents)
        rows = [shape[0] for shape in shapes]
        return [
            jax.lax.slice_in_dim(mean, place.position * length, (place.position + 1) * length)
            for mean, length in zip(means, rows)
        ]
    return _gather_parts(operation, place, cotangents, [shape[0] for shape in shapes])


def _gather_parts(operation: Operation, place: SetPosition, parts: List[Any], rows: List[int]) -> List[Any]:
    """Return all ranks' gradients of a reducescatter, by rows; times the number of ranks for a sum."""
    every_rank = Reduction(process_set=operation.how.process_set)
    layouts = [edges_of(operation, length, place.size) for length in rows]
    lengths = [[stop - start for start, stop in zip(edges, edges[1:])] for edges in layouts]
    padded = []
    for part, each in zip(parts, lengths):
        missing = max(each) - part.shape[0]
        scaled = part * jnp.asarray(operation.how.gathered_factor, part.dtype)
        padded.append(jnp.pad(scaled, [(0, missing)] + [(0, 0)] * (part.ndim - 1)))
    gathered = bind(Operation("allgather", every_rank, operation.name, len(parts)), padded)
    whole = []
    for item, each in zip(gathered, lengths):
        most = max(each)
        own = [item[rank * most : rank * most + length] for rank, length in enumerate(each)]
        whole.append(jnp.concatenate(own))
    return whole


def _vectorize(operands: Sequence[Any], dims: Sequence[Optional[int]], *, call: HostCall) -> Any:
    """Run the operation on arrays with one more dimension, which is not that of the rows."""
    operation = call.operation
    if operation.is_coded or operation.how.op == ReduceOp.ADASUM:
        raise NotOfferedError("vmap of an allreduce by Adasum or with codes: it is not element-wise.")
    if not operation.keeps_shapes:
        # Rows stay in front.
        operands = [
            operand if dim is None else jnp.moveaxis(operand, dim, 1) for operand, dim in zip(operands, dims)
        ]
        dims = [None if dim is None else 1 for dim in dims]
    weighted = operation.has_weight
    if weighted and dims[-1] is not None:
        raise NotOfferedError("vmap over the weight of an allreduce: one call has one weight.")
    return collective_p.bind(*operands, call=call), list(dims[:-1] if weighted else dims)


ad.primitive_jvps[collective_p] = _differentiate
ad.primitive_transposes[collective_p] = _transpose
batching.primitive_batchers[collective_p] = _vectorize
