"""Public names: those that a package exports, and the texts that many of their docstrings share.

A docstring may hold lines like ``{name}``, usually below ``Args:``. :func:`documented` replaces each by the
text in :data:`SHARED`, so that ``help()`` shows the whole description; the API reference does the same.
"""

from __future__ import annotations

import inspect
import re
from types import ModuleType
from typing import Any, Callable, Dict, List, TypeVar

from .ops import CODEC_KINDS

Documented = TypeVar("Documented", bound=Callable[..., Any])

_PLACEHOLDER = re.compile(r"^([ \t]*)\{(\w+)\}[ \t]*$", re.MULTILINE)

_CODECS = ",\n    ".join(f'``"{item.name}"`` ({item.about})' for item in CODEC_KINDS)

# By placeholder: the lines that replace it (continuation lines of a parameter indented by 4).
SHARED: Dict[str, str] = {
    # Parameters.
    "name": """\
name: the operation's name. Operations of the same name belong together, in whatever order ranks start
    them. Operations without a name are matched by their order.""",
    "call_name": """\
name: optional. It appears in errors, and must be the same on all ranks. It does not match calls: all
    ranks must make the same calls in the same order.""",
    "process_set": """process_set: the ranks that take part; by default all ranks of the job.""",
    "direct_set": """\
process_set: the ranks that take part; by default all ranks of the job. With a process set, the call starts
    the asynchronous operation and waits for it. Ranks of the set match it by its name. Calls without a name
    are matched by their order among such calls in this set; other calls do not count.""",
    "op": """\
op: ``Average`` (the default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``. An average of
    integers is truncated toward zero. Adasum (floating point only) combines contributions in pairs: it adds
    orthogonal ones and averages equal ones.""",
    "scatter_op": """\
op: ``Average`` (the default), ``Sum``, ``Min``, ``Max`` or ``Product``. An average of integers is
    truncated toward zero.""",
    "average": """average: deprecated, use ``op``. True is ``Average``, False is ``Sum``.""",
    "prescale_factor": """\
prescale_factor: every contribution is multiplied by this number before the reduction.""",
    "postscale_factor": """postscale_factor: the result is multiplied by this number after the reduction.""",
    "weight": """\
weight: with ``Average``, the result is the sum of ``weight * array`` over all ranks, divided by the sum of
    the weights. Pass the number of samples from which this rank's array was computed. An array with weight
    0 is ignored, even if it contains NaN. Either all ranks pass a weight or none; not all may be 0.""",
    "root_rank": """\
root_rank: the rank whose data are sent. It is a rank of the job, also if only a process set takes part.""",
    "compression": f"""\
compression: how float32 and float64 are sent: {_CODECS},
    or a member of ``Compression``; by default ``Compression.none``. A single call has no error feedback:
    the rounding errors of int8 and int4 are lost. (``DistributedOptimizer`` adds them to the next gradient.)
    Integers, and all reductions but Sum and Average, are never compressed. All ranks pass the same value.""",
    "gradient_compression": f"""\
compression: how gradients are sent: {_CODECS},
    or a member of ``Compression``; by default ``Compression.none``. int8 and int4 apply to gradients of
    matrices; other gradients are sent as bfloat16. Rounding errors are added to the next gradient.""",
    "message": """tag: distinguishes messages between the same two ranks.
name: optional. It appears in errors, and must be the same on both ranks.
process_set: a set to which both ranks belong. A receive matches only messages of its own set.""",
    "message_errors": """ConfigError: the set has no such rank, or the rank is this one.
MismatchError: the other rank passes another shape or element type.""",
    "codec": f"""\
compression: the codec for float32 and float64 on the network: {_CODECS};
    None is the default. Every element is encoded twice, as a contribution and as a result; sums are float32.
    Integers, and all reductions but Sum and Average, are never compressed. All ranks pass the same value.""",
    "urgent": """\
urgent: start at once, and do not wait for other tensors to be sent in the same message. The input is not
    copied, so do not change it before you have the result.""",
    "splits": """\
splits: number of rows for each rank, in rank order: one integer per rank. Their sum is the number of
    rows. Without it every rank gets equally many rows, and the number of rows must be a multiple of the
    number of ranks.""",
    "splits_tensor": """\
splits: a list or a one-dimensional tensor of integers: the number of rows for each rank, in rank order.
    Without it every rank gets equally many rows, and the number of rows must be a multiple of the
    number of ranks.""",
    "array_in": """\
array: a NumPy array of any memory layout, an object that ``numpy.asarray`` accepts (such as a CPU tensor of
    PyTorch), or an array on a GPU (of CuPy, PyTorch or others; see docs/gpu.md). Its dtype is bool, an
    integer of 8 to 64 bits, float16/32/64, bfloat16 or complex64/128. All ranks pass equal shapes and
    dtypes.""",
    "array_rows": """\
array: a NumPy array of any memory layout, or an object that ``numpy.asarray`` accepts. The dtype and all
    dimensions but the first are equal on all ranks.""",
    "array_inplace": """\
array: a writable NumPy array of any memory layout, of equal shape and dtype on all ranks. It is
    overwritten. If it is C-contiguous, no copy is made.""",
    "array_pending": """\
array: a writable NumPy array of any memory layout, of equal shape and dtype on all ranks. It is
    overwritten and must not be used until the handle is done.""",
    "arrays_in": """\
arrays: NumPy arrays of any memory layout, or objects that ``numpy.asarray`` accepts; equal in number, shapes
    and dtypes on all ranks. They are copied before the function returns.""",
    "arrays_rows": """\
arrays: NumPy arrays of any memory layout, or objects that ``numpy.asarray`` accepts. Their number, their
    dtypes and all dimensions but the first are equal on all ranks. They are copied before the function
    returns.""",
    "arrays_pending": """\
arrays: writable NumPy arrays of any memory layout; equal in number, shapes and dtypes on all ranks. They
    are overwritten and must not be used until the operation is done.""",
    "tensor_in": """tensor: a dense tensor on any device, of equal shape and dtype on all ranks.""",
    "tensor_rows": """\
tensor: a dense tensor on any device; the dtype and all dimensions but the first are equal on all ranks.""",
    "tensor_inplace": """\
tensor: a dense tensor on any device, of equal shape and dtype on all ranks. It is overwritten.""",
    "tensor_pending": """\
tensor: a dense tensor on any device, of equal shape and dtype on all ranks. It is overwritten and must not
    be used until the handle is done.""",
    "tensors_in": """\
tensors: dense tensors on any device; equal in number, shapes and dtypes on all ranks.""",
    "tensors_rows": """\
tensors: dense tensors on any device; their number, their dtypes and all dimensions but the first are equal
    on all ranks.""",
    "tensors_inplace": """\
tensors: dense tensors on any device; equal in number, shapes and dtypes on all ranks. They are
    overwritten.""",
    "tensors_pending": """\
tensors: dense tensors on any device; equal in number, shapes and dtypes on all ranks. They are overwritten
    and must not be used until the handle is done.""",
    "jax_tree": """\
tree: a pytree of arrays and numbers, of the same structure, shapes and dtypes on all ranks. None in it
    stays None.""",
    "jax_name": """\
name: the operation's name, or None. Operations without a name are matched by their order in the
    program.""",
    "jax_errors": """\
MismatchError: ranks disagree about the call. In place of this error and of the next one, a compiled program
    raises a ``JaxRuntimeError`` with the same text, when its result is used: see ``typed_errors()``.
PeerLostError: a rank was lost.
NotInitializedError: before ``init()``, or after ``shutdown()``.""",
    "mlx_tree": """\
tree: a tree (nested dicts, lists and tuples) of arrays and numbers, of the same structure, shapes and dtypes
    on all ranks. None in it stays None.""",
    "mlx_errors": """ConfigError: a leaf is neither an array nor a number.
MismatchError: ranks disagree about the call.
NotOfferedError: MLX compiles or vectorizes the function that makes the call.
PeerLostError: a rank was lost.
NotInitializedError: before ``init()``, or after ``shutdown()``.""",
    # Ranks of unequal speed.
    "balanced_count": """count: the data set, or its number of samples; the same on all ranks.""",
    "balanced_options": """global_batch: samples of all ranks together per step.
seed: seed for the order of the samples, the same on all ranks.
speeds: ``"measure"``: shares are equal at first, and then follow the measured speeds. Or a list with a number
    for each rank, such as ``[3, 1, 1]``: shares have these proportions, and do not change.
min_batch: the fewest samples for a rank, for example for batch normalization.
max_batch: the most samples for a rank: one number for all, or a list with a number (or None) for each.
multiple_of: shares are multiples of this number if possible, for compilers that compile every new shape.
shuffle: True: a new order in each epoch; False: the order of the data set.
drop_last: leave out the samples that do not fill a global batch. Otherwise they are a shorter global batch,
    divided in the same proportions.
context: function that returns the context of the job; by default that of ``init()``.""",
    "balanced_batches": """\
batches: the ``BalancedBatches`` or ``BalancedDataset`` that the data come from. Gradients are then weighted
    by the number of samples of each rank, and shares follow the measured speeds. This needs ``op=Average``
    and one backward pass per step.""",
    "balanced_errors": """\
ConfigError: no division satisfies the arguments, or there is not one speed for each rank.
NotInitializedError: before ``init()``, or after ``shutdown()``.""",
    # Errors.
    "collective_errors": """\
UnsupportedDtypeError: the dtype cannot be sent, or the operation has no meaning for it.
MismatchError: ranks disagree about the call (collective, shape, dtype, op, root, …).
PeerLostError: a rank ended, or is silent for too long (``RINGCOMM_DEAD_AFTER``).
Misuse: an earlier MismatchError or PeerLostError has ended the collectives of this job.""",
    "rank_errors": """MismatchError: ranks disagree about the call.
PeerLostError: a rank ended, or is silent for too long.""",
    "not_initialized": """NotInitializedError: before ``init()``, or after ``shutdown()``.""",
    "direct_errors": """\
UnknownProcessSetError: the process set is not registered, or this rank is not a member of it.
NotInitializedError: before ``init()``, or after ``shutdown()``.""",
    "start_errors": """\
UnsupportedDtypeError: the dtype cannot be sent, or the operation has no meaning for it.
UnknownProcessSetError: the process set is not registered, or this rank is not a member of it.
DuplicateNameError: an operation of this name has been started and is not done.
NotInitializedError: before ``init()``, or after ``shutdown()``.
MismatchError: (when you take the result) ranks disagree about the call.
PeerLostError: (when you take the result) a rank ended, or is silent for too long.""",
    "call_errors": """UnsupportedDtypeError: the dtype cannot be sent, or the operation has no meaning for it.
UnknownProcessSetError: the process set is not registered, or this rank is not a member of it.
NotInitializedError: before ``init()``, or after ``shutdown()``.
MismatchError: ranks disagree about the call; no data have been changed.
PeerLostError: a rank ended, or is silent for too long. Arguments that are overwritten may then hold
    intermediate results.""",
    # PyTorch
    "torch_optimizer_op": """\
op: ``Average`` (the default), ``Sum``, ``Min``, ``Max`` or ``Product`` of the gradients; or ``Adasum``. With
    Adasum, each rank makes the optimizer's own step with its own gradients during ``step()``, and Adasum
    combines the changes of the parameters. Then nothing is reduced during ``backward()``,
    ``synchronize()`` has no effect, and ``skip_synchronize()`` raises AssertionError. ``groups``,
    ``backward_passes_per_step``, ``sparse_as_dense``, int8 and int4 have no effect either.""",
    "torch_optimizer_errors": """\
MismatchError: (from ``step()`` or ``synchronize()``) parameters or arguments differ between ranks.
PeerLostError: (from ``step()`` or ``synchronize()``) a rank ended, or is silent for too long.
AssertionError: (from ``backward()``) there were more passes than ``backward_passes_per_step`` since the last
    step, or (from ``zero_grad()``) reductions of this step are in progress.""",
    # TensorFlow and Keras
    "tf_name": """name: name of the operation. Operations of the same name on all ranks belong
    together. None: in a graph or ``tf.function`` the place in the graph determines the name; in eager
    mode operations are matched by the order of the calls.""",
    "tf_average": """average: deprecated form of ``op``: True is Average, False is Sum.""",
    "tf_device_dense": """device_dense: no effect; accepted because Horovod's function has it.""",
    "tf_device_sparse": """device_sparse: no effect; accepted because Horovod's function has it.""",
    "tf_ignore_name_scope": """ignore_name_scope: no effect; accepted because Horovod's function has it.""",
    "tf_sparse_as_dense": """sparse_as_dense: convert ``tf.IndexedSlices`` to dense tensors before they
    are reduced; otherwise the slices of all ranks are gathered.""",
    "tf_gradient_op": """op: Average (the default), Sum or Adasum.""",
    "tf_gradient_predivide_factor": """gradient_predivide_factor: with Average, divide by this factor
    before the sum, and by (number of ranks / factor) after it, so that float16 sums stay in range.""",
    "tf_num_groups": """num_groups: split the gradients into this number of groups, each reduced as one
    operation; 0: one group.""",
    "tf_groups": """groups: the number of groups, or a list of lists of variables that are reduced
    together.""",
    "tf_scale_local_gradients": """scale_local_gradients: divide the gradients of local (not reduced)
    variables by the number of ranks.""",
    "tf_backward_passes_per_step": """backward_passes_per_step: number of batches whose gradients are
    summed on this rank before one reduction and one step.""",
    "tf_average_aggregated_gradients": """average_aggregated_gradients: divide the local sums by
    ``backward_passes_per_step``.""",
    # MXNet
    "mx_priority": """priority: no effect; accepted because Horovod's function has it. A call waits for its
    result.""",
    "mx_gradient_predivide_factor": """gradient_predivide_factor: divide by this factor before the sum and
    by (number of ranks / factor) after it, so that float16 sums stay in range.""",
    "mx_num_groups": """num_groups: split the gradients into this number of groups, each reduced as one
    operation; 0: groups of up to 8 MiB.""",
    "local_sgd": """\
sync_every: number of local steps (batches) between two synchronizations. Or a list with a number per rank:
    slow ranks make fewer steps, and count for less in the average. Or ``"auto"``: one step at first, later
    the number of steps with which exchanges take 10 % of the time, or fewer if ``max_drift`` demands it.
outer_lr: step size of the outer optimizer. With 1 and no momentum, the weights are averaged.
outer_momentum: Nesterov momentum of the outer optimizer; 0: none.
compression: the codec for the changes of the weights: a name such as ``"int8"``, or None.
process_set: the ranks that take part; by default all.
fragments: number of parts of similar size into which weights are divided. The parts are synchronized one
    after another within each interval.
overlap: number of local steps that run beside a reduction before its result is used; their changes are
    kept. 0: wait for the result at once. It must be less than ``sync_every``.
max_drift: how far apart the ranks' weights may be, relative to their norm (root of the mean square). If they
    are further apart, the next automatic interval is shorter; a fixed interval causes a warning. By default
    0.01 with ``"auto"`` (0.001 in PyTorch with an optimizer that has an ``eps``), otherwise 0.2;
    ``math.inf``: no limit.""",
    # Keras
    "keras_saved": """filepath: path of the saved model.
custom_optimizers: the user's optimizer classes that the file names.
custom_objects: other classes and functions that the file names, by name.""",
    "keras_legacy_opts": """legacy_opts: no effect; accepted because Horovod's function has it.""",
    "keras_steps_per_epoch": """steps_per_epoch: number of batches per epoch; None: the number that Keras
    reports.""",
    "keras_logs": """logs: metrics by name.""",
}


def _section(title: str, text: str) -> str:
    return f"{title}:\n" + "\n".join("    " + line for line in text.split("\n"))


def _fill(names: str) -> str:
    return "\n".join(SHARED[name] for name in names.split())


SHARED["set_errors"] = SHARED["direct_errors"] + "\nPeerLostError: a rank ended, or is silent for too long."
SHARED["message_errors"] += "\n" + SHARED["set_errors"]
_TENSOR = "ConfigError: an input is not a dense tensor, or arguments contradict each other.\n"
SHARED["tensor_call_raises"] = _section("Raises", _TENSOR + SHARED["call_errors"])
SHARED["tensor_start_raises"] = _section("Raises", _TENSOR + SHARED["start_errors"])
SHARED["tensor_handle"] = _section(
    "Returns", "a handle; ``synchronize(handle)`` returns the result of the function without ``_async``."
) + "\n\n" + SHARED["tensor_start_raises"]  # fmt: skip
SHARED["matching"] = _fill("name process_set")
SHARED["mx_matching"] = _fill("name mx_priority process_set")
SHARED["tf_gradients_options"] = _fill(
    "tf_device_dense tf_device_sparse gradient_compression tf_sparse_as_dense tf_gradient_op "
    "tf_gradient_predivide_factor tf_num_groups tf_groups process_set"
)
SHARED["tf_matching"] = _fill("tf_name tf_ignore_name_scope process_set")
SHARED["keras_load"] = _fill("keras_saved gradient_compression keras_legacy_opts")
SHARED["jax_matching"] = _fill("jax_name process_set")


def _method(args: str, returns: str, raises: str) -> str:
    """Return what follows the summary of a synchronous collective, of a context and of the module alike."""
    sections = [_section("Args", args)] if args else []
    sections += [_section("Returns", returns)] if returns else []
    return "\n\n".join([*sections, _section("Raises", raises)])


_NOT_AN_ARRAY = "Misuse: ``array`` is not a NumPy array, or it is read-only.\n"
_NO_ROWS = "Misuse: the array has no first dimension.\n"
_NO_ROOT = "Misuse: ``root_rank`` is not a rank of the job.\n"
_ERRORS, _RANK_ERRORS = SHARED["collective_errors"], SHARED["rank_errors"]
_PICKLE = "Misuse: (on every rank) an object cannot be pickled.\n"
_PICKLE += "ProtocolError: the received bytes do not have the sending rank's signature.\n"

SHARED.update({
    "allreduce": _method(
        _fill("array_in") + "\n{options}",
        "a new C-ordered NumPy array of the same shape and dtype, bit-identical on all ranks. For an array\n"
        "on a GPU, a new array of the same library on that GPU.",
        "Misuse: ``weight`` is not a valid weight, or the reduction is not an average.\n" + _ERRORS,
    ),
    "allreduce_": _method(
        _fill("array_inplace") + "\n{options}",
        "``array`` itself, which holds the result, bit-identical on all ranks.",
        "Misuse: ``weight`` is not a valid weight, or the reduction is not an average.\n"
        + _NOT_AN_ARRAY + _ERRORS,
    ),
    "reducescatter": _method(
        _fill("array_in") + "\n{options}",
        "a new array with this rank's rows. Without ``splits`` every rank gets ``n // size`` of\n"
        "``n`` rows; the first ``n % size`` ranks get one more.",
        _NO_ROWS + _ERRORS,
    ),
    "reducescatter_": _method(
        _fill("array_inplace") + "\n{options}",
        "a view of this rank's rows in ``array``. Without ``splits`` every rank gets ``n // size`` of ``n``\n"
        "rows; the first ``n % size`` ranks get one more. Other rows then hold intermediate results.",
        _NOT_AN_ARRAY + _NO_ROWS + _ERRORS,
    ),
    "allgather": _method(
        _fill("array_rows call_name"),
        "a new array with the rows of all ranks, in rank order. The number of rows may differ between\n"
        "ranks, and may be 0. A zero-dimensional array counts as one row.",
        _ERRORS,
    ),
    "allgather_": _method(
        _fill("array_inplace call_name"),
        "``array`` itself, with the rows of all ranks.",
        _NOT_AN_ARRAY + _NO_ROWS + _ERRORS,
    ),
    "broadcast": _method(
        _fill("array_in root_rank call_name"),
        "a new C-ordered array with the root's elements.",
        _NO_ROOT + _ERRORS,
    ),
    "broadcast_": _method(
        _fill("array_inplace root_rank call_name"),
        "``array`` itself, with the root's elements.",
        _NOT_AN_ARRAY + _NO_ROOT + _ERRORS,
    ),
    "alltoall": _method(
        _fill("array_rows splits call_name"),
        "the received rows, in rank order. With ``splits``, a pair: the received rows, and the number of\n"
        "rows from each rank (int32, shape ``(size,)``).",
        "Misuse: the splits do not fit the array, or it has no first dimension.\n" + _ERRORS,
    ),
    "alltoall_": _method(
        _fill("array_inplace call_name"),
        "``array`` itself, with the received rows in rank order.",
        _NOT_AN_ARRAY + "Misuse: the number of rows is no multiple of the number of ranks.\n" + _ERRORS,
    ),
    "barrier": _method(_fill("call_name"), "", _RANK_ERRORS),
    "broadcast_object": _method(
        "value: any object that cloudpickle can pickle; ignored on all ranks but the root.\n"
        + _fill("root_rank call_name"),
        "the root's own object on the root, an equal copy on the other ranks.",
        _NO_ROOT + _PICKLE + _RANK_ERRORS,
    ),
    "allgather_object": _method(
        "value: any object that cloudpickle can pickle.\n" + _fill("call_name"),
        "a list with every rank's object, in rank order.",
        _PICKLE + _RANK_ERRORS,
    ),
})  # fmt: skip
for _name in (
    "allgather", "allgather_", "broadcast", "broadcast_", "alltoall", "alltoall_", "barrier",
):  # fmt: skip
    _last = "\n    ".join(["", *SHARED["direct_set"].split("\n")])  # more than a context's method has
    SHARED[f"{_name}_in_set"] = SHARED[_name].replace("\n\n", f"{_last}\n\n", 1)


def compose(text: str) -> str:
    """Return a docstring with its placeholders replaced; KeyError if one is not in :data:`SHARED`.

    >>> compose("Args:\\n    {keras_logs}")
    'Args:\\n    logs: metrics by name.'
    """

    def shared(found: re.Match[str]) -> str:
        indent, name = found.groups()
        if name == "options":  # for collective.options
            return found.group(0)
        return "\n".join((indent + line).rstrip() for line in SHARED[name].split("\n"))

    return _PLACEHOLDER.sub(shared, text)


def documented(function: Documented) -> Documented:
    """Compose the docstring of a function or a class, and those of a class's methods; a decorator."""
    parts: List[Any] = [function]
    if isinstance(function, type):
        parts += [item for item in vars(function).values() if inspect.isfunction(item)]
    for part in parts:
        if part.__doc__:
            part.__doc__ = compose(part.__doc__)
    return function


def export(package: Dict[str, Any], *more: str) -> List[str]:
    """Set a package's ``__all__`` to its imported objects and ``more``, and return it.

    They are imported as in ``from .optimizer import Optimizer as Optimizer``, which type checkers take for an
    export. Modules and names with an underscore are exported only by ``more``.
    """
    own = (name for name, thing in package.items() if not isinstance(thing, ModuleType))
    names = package["__all__"] = sorted({*(name for name in own if not name.startswith("_")), *more})
    return names
