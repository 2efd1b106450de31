"""Collectives as parts of JAX's programs: the call on the host, the primitive, ``hvd.jit``, and errors.

**Gradients** follow Horovod, as in the other adapters: the gradient of a sum is the sum of the ranks'
gradients, that of an average their average, that of an allgather this rank's rows of the averaged gradients.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from .. import api
from .._adapter.graph_callbacks import (
    Batch,
    Operation,
    can_be_in_order,
    is_in_order,
    overwrite_in_order,
    run_in_order,
)
from .._adapter.reduction import Reduction
from .._adapter.submit import cause_of, record_cause, with_causes
from ..calls.async_calls import SequenceName
from ..calls.process_set import number_of, rank_in, size_of
from ..collective.observe import Site, this_site
from ..collective.rows import scatter_layout
from ..docstrings import documented
from ..dtypes import Array
from ..errors import MismatchError, NotOfferedError, ShapeError
from ..ops import ReduceOp, weight_of

try:
    from jax._src.core import trace_state_clean
except ImportError:
    trace_state_clean = None

logger = logging.getLogger("ringcomm.jax")

# ---- on the host: collectives on NumPy arrays ----------------------------------------------------
# A callback that called JAX could wait for a thread of XLA's pool while it occupies the only one.

# The default name of operations in compiled programs that are matched by name; JAX executes them in order.
SEQUENCE = SequenceName("jax.jit")

NO_SPLITS = np.zeros(0, np.int32)  # an alltoall's row counts: every rank gets the same number of rows


class SetPosition(NamedTuple):
    """This rank's position in a process set, and the set's size, where shapes depend on them."""

    position: int
    size: int


def place_for(operation: Operation) -> Optional[SetPosition]:
    """Return the place that a program is compiled for; None: it fits every number of ranks."""
    process_set = operation.how.process_set
    api.context().engine.sets.check_member(number_of(process_set))
    if operation.kind in ("reducescatter", "allgather", "alltoall"):
        return SetPosition(rank_in(process_set), size_of(process_set))
    return None


class HostCall(NamedTuple):
    """A collective in a compiled program, where shapes are fixed."""

    operation: Operation
    place: Optional[SetPosition]  # the program was compiled for it
    site: Site  # of the call in the program

    @property
    def overwrites(self) -> bool:
        """Return whether the arrays of :meth:`run_now` receive the results."""
        operation = self.operation
        return operation.keeps_shapes and not operation.has_weight and not operation.is_coded

    def run(self, arrays: Sequence[Array]) -> List[Array]:
        """Execute it; return new arrays, or the given ones where these are not read any more."""
        operation, place = self.operation, self.place
        if place is None:
            return self._execute(arrays)
        if place_for(operation) != place:
            error = MismatchError(
                f"This program was compiled for rank {place.position} of {place.size}, and the ranks have "
                "changed since. Call jax.clear_caches() after ringcomm.init()."
            )
            record_cause(error)
            raise error
        if operation.kind == "allgather":
            # As one row of equal shape each, so that ranks with other numbers of rows get an error.
            gathered = self._execute([array[np.newaxis] for array in arrays])
            return [part.reshape(-1, *array.shape[1:]) for part, array in zip(gathered, arrays)]
        if operation.kind == "alltoall":
            blocks = arrays[0].reshape(place.size, -1, *arrays[0].shape[1:])
            return [self._execute([blocks, NO_SPLITS])[0].reshape(arrays[0].shape)]
        return self._execute(arrays)

    def run_now(self, arrays: Sequence[Array]) -> List[Array]:
        """Execute it outside of compiled programs, where ranks may have different numbers of rows."""
        if self.overwrites:
            if can_be_in_order(self.operation):
                overwrite_in_order(self.operation, arrays, self.site)
            else:
                Batch([self.operation]).overwrite(arrays)
            return list(arrays)
        alone = self.operation.kind == "alltoall" and len(arrays) == 1
        return self._execute([*arrays, NO_SPLITS] if alone else arrays, None)

    def _execute(self, arrays: Sequence[Array], name: Optional[str] = SEQUENCE) -> List[Array]:
        if can_be_in_order(self.operation):
            return run_in_order(self.operation, arrays, self.site)
        operation = self.operation if self.operation.name else self.operation._replace(name=name)
        return Batch([operation]).run(arrays)


def rows_of(kind: str, shape: Sequence[int]) -> int:
    """Return the first dimension of an array; ShapeError without dimensions."""
    if not shape:
        raise ShapeError(f"{kind} needs an array with at least one dimension, to divide it by rows.")
    return shape[0]


def results_of(call: HostCall, shapes: Sequence[Sequence[int]]) -> List[List[int]]:
    """Return the shapes of a call's results from those of its arrays."""
    operation, place = call.operation, call.place
    results = [list(shape) for shape in (shapes[:-1] if operation.has_weight else shapes)]
    if place is None:
        return results
    for shape in results:
        rows = rows_of(operation.kind, shape)
        if operation.kind == "allgather":
            shape[0] = rows * place.size
        elif operation.kind == "reducescatter":
            edges = edges_of(operation, rows, place.size)
            shape[0] = edges[place.position + 1] - edges[place.position]
    return results


def edges_of(operation: Operation, rows: int, size: int) -> Sequence[int]:
    """Return the boundaries between the ranks' parts of ``rows`` rows in a reducescatter."""
    return scatter_layout([(rows,)], size, operation.how.options).edges[0]


# ---- the primitive: how it is compiled and executed ----------------------------------------------

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
    """Add a collective to the traced program, or execute it if none is traced; return its results."""
    call = HostCall(operation, place_for(operation), this_site())
    results_of(call, [operand.shape for operand in operands])
    return collective_p.bind(*operands, call=call)


@collective_p.def_effectful_abstract_eval
def _abstract(*operands: Any, call: HostCall) -> Any:
    shapes = results_of(call, [operand.shape for operand in operands])
    results = [jax.core.ShapedArray(tuple(shape), operand.dtype) for shape, operand in zip(shapes, operands)]
    return results, {effect}


def _lower(ctx: Any, *operands: Any, call: HostCall) -> Sequence[Any]:
    """Emit the call of the host into a program, for every kind of device, as ``io_callback`` does. That would
    make JAX arrays of the operands inside the callback; with one thread of XLA, converting these to NumPy
    waits for ever for that thread.
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
    """Execute a call on the host, after the programs that this thread has started."""
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
    """Return a JAX array, perhaps in the memory of the NumPy array, on the device of ``like``."""
    share = array.nbytes >= _SHARED_FROM_BYTES and array.dtype.kind in "iufc"
    result = jnp.from_dlpack(array) if share else jnp.asarray(array)
    device = getattr(like, "sharding", None)
    on_accelerator = device is not None and next(iter(device.device_set)).platform != "cpu"
    if on_accelerator:  # pragma: no cover - needs a GPU or a TPU
        return jax.device_put(result, device)
    return result


# ---- derivatives -----------------------------------------------------------------------------


def weights_of(weight: Any) -> List[Any]:
    """Return the weight as the last operand of a reduction; none if it is None."""
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
    # Of a reducescatter: each rank's rows within zeros, whose sum over the ranks is the whole.
    parts = []
    for part, (length, *_) in zip(cotangents, shapes):
        before = edges_of(operation, length, place.size)[place.position]
        scaled = part * jnp.asarray(operation.how.gathered_factor, part.dtype)
        widths = [(before, length - before - part.shape[0])] + [(0, 0)] * (part.ndim - 1)
        parts.append(jnp.pad(scaled, widths))
    summed = Reduction(ReduceOp.SUM, process_set=operation.how.process_set)
    return bind(Operation("allreduce", summed, operation.name, count), parts)


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


# ---- hvd.jit -------------------------------------------------------------------------------------
# JAX starts a program with an ordered effect in Python, and hands it the token of the program before: 0.1 ms.
# A program without effects is started in C++, in some microseconds. So jit() compiles the function as one
# operation that has no effect outside. The first token is made in the program, and from there JAX passes it
# from collective to collective as in any program, in scan, while and cond too. Programs that a thread has
# started are executed one after another on a device; JAX itself relies on that for its tokens.

program_p = Primitive("ringcomm_program")
program_p.multiple_results = True


@documented
def jit(fun: Optional[Callable[..., Any]] = None, **options: Any) -> Any:
    """``jax.jit`` for functions with collectives. JAX starts the program about 0.1 ms faster.

    Results, order and errors are the same as with ``jax.jit``. Within another function that is compiled,
    differentiated or vectorized, it is ``jax.jit`` itself.

    Example::

        @hvd.jit
        def step(params, opt_state, batch): ...

    Args:
        fun: the function. With None, the result is a decorator.
        options: keyword arguments of ``jax.jit``, such as ``donate_argnums``.

    Returns:
        a function with the arguments and the results of ``fun``.
    """
    if fun is None:
        return functools.partial(jit, **options)
    within = jax.jit(fun, **options)
    if trace_state_clean is None:
        return within
    started = jax.jit(_as_one_operation(fun), **_with_done(options))

    @functools.wraps(fun)
    def start(*args: Any, **kwargs: Any) -> Any:
        if not trace_state_clean():
            return within(*args, **kwargs)
        results, latest.done = started(*args, **kwargs)
        return results

    return start


def _with_done(options: Dict[str, Any]) -> Dict[str, Any]:
    """Return the options for a program with one more result."""
    if "out_shardings" in options:
        return {**options, "out_shardings": (options["out_shardings"], None)}
    return options


def _as_one_operation(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as one operation, with one more result, which is ready at the program's end."""

    @functools.wraps(fun)
    def whole(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = jax.tree_util.tree_flatten((args, kwargs))
        # The others are static arguments.
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, jax.core.Tracer)]

        def on_arrays(*arrays: Any) -> Any:
            given = list(leaves)
            for place, array in zip(places, arrays):
                given[place] = array
            own_args, own_kwargs = jax.tree_util.tree_unflatten(structure, given)
            return fun(*own_args, **own_kwargs), jnp.zeros((), bool)

        arrays = [leaves[place] for place in places]
        program, shapes = jax.make_jaxpr(on_arrays, return_shape=True)(*arrays)
        if program.effects - {effect}:
            results = jaxpr_as_fun(program)(*arrays)  # JAX must see these effects
        else:
            results = program_p.bind(*arrays, program=program)
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(shapes), results)

    return whole


@program_p.def_abstract_eval
def _results_of_program(*_: Any, program: Any) -> List[Any]:
    return list(program.out_avals)


@program_p.def_impl
def _execute_program(*operands: Any, program: Any) -> List[Any]:
    """Run the program with ``jax.disable_jit()``."""
    return list(jaxpr_as_fun(program)(*operands))


def _lower_program(ctx: Any, *operands: Any, program: Any) -> Any:
    tokens = mlir.TokenSet.create([effect])
    return mlir.lower_fun(jaxpr_as_fun(program))(ctx.replace(tokens_in=tokens, tokens_out=None), *operands)


mlir.register_lowering(program_p, _lower_program, **uncached)


# ---- errors, and the end of the job ----------------------------------------------------------


@contextmanager
def typed_errors() -> Iterator[None]:
    """Context manager that raises a collective's own error in place of JAX's error, which only quotes it.

    Outside of compiled programs collectives raise their own errors (``PeerLostError``, ``MismatchError``, …).
    In a compiled program, XLA turns each error into a ``JaxRuntimeError`` with the same text. JAX raises it
    when a result of the program is used. The end of this ``with`` block waits for programs in progress, so
    that their errors are raised here.

    Example::

        with hvd.typed_errors():
            for batch in batches:
                params, loss = step(params, batch)

    Returns:
        a context manager.

    Raises:
        RingcommError: a collective failed in the block.
    """
    with with_causes():
        yield
        wait_for_programs()


def _finish() -> None:
    """Wait for programs in progress: their collectives need this rank's connections."""
    try:
        wait_for_programs()
    except Exception as error:  # noqa: BLE001 - of a collective; where its results are used it is raised too
        logger.warning("A collective of a JAX program failed: %s", cause_of(error) or error)


def _programs_first() -> None:
    """Wait for the programs that this thread has started: their collectives precede the next call."""
    if not is_in_order():
        with with_causes():
            wait_for_programs()


api.before_leaving(_finish)
api.before_calls(_programs_first)
