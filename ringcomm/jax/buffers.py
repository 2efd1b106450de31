"""The fast way from a compiled program to the host: a callback on XLA's own buffers, without copies.

XLA calls the callback with its buffers in place of arrays. An operation that overwrites its arrays gets its
operands and results in the same memory, so there is nothing to copy. The order of the calls is that of an
effect of our own: JAX passes a token from each operation with the effect to the next, in ``scan``, ``while``
and ``cond`` too, and from each program to the next of the same Python thread.

All of this uses private names of JAX, so :mod:`.mechanism` tries it first. Each name that the module needs is
used when it is imported or in that trial.
"""

from __future__ import annotations

from typing import Any, List, Sequence

import numpy as np
from jax._src import core, effects, ffi
from jax.interpreters import mlir

from .host_call import HostCall
from .io_callbacks import emit


class CollectiveEffect(effects.Effect):
    """Operations with this effect are executed in program order."""

    def __hash__(self) -> int:
        # The same in every process, because JAX sorts and hashes effects.
        return 0x72696E67

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CollectiveEffect)

    def __repr__(self) -> str:
        return "ringcomm's collectives (each rank can use one device)"

    __str__ = __repr__


effect = CollectiveEffect()

for allowed in (
    effects.ordered_effects,
    effects.lowerable_effects,
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.remat_allowed_effects,
):
    allowed.add_type(CollectiveEffect)


def lower(ctx: Any, call: HostCall, *operands: Any) -> Sequence[Any]:
    """Emit the call of the host into a program."""
    token = ctx.tokens_in.get(effect)
    results: Sequence[Any]
    on_cpu = ctx.module_context.platforms[0] == "cpu"
    token, results = (_emit if on_cpu else emit)(ctx, call, token, operands)
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({effect: token})))
    return results


def _emit(ctx: Any, call: HostCall, token: Any, operands: Sequence[Any]) -> Any:
    inputs = len(operands)

    def on_host(_: Any, *buffers: Any) -> Any:
        # The first operand and the first result are the token.
        given = [np.asarray(buffer) for buffer in buffers[1 : 1 + inputs]]
        results = [np.asarray(buffer) for buffer in buffers[2 + inputs :]]
        execute(call, given, results)
        return ()

    ctx.module_context.add_host_callback(on_host)
    index = np.uint64(len(ctx.module_context.host_callbacks) - 1)
    with_token = ctx.replace(
        avals_in=[core.abstract_token, *ctx.avals_in], avals_out=[core.abstract_token, *ctx.avals_out]
    )
    aliases = {place: place for place in range(1, 1 + inputs)} if call.overwrites else {}
    lowered = ffi.ffi_lowering(
        "xla_buffer_python_cpu_callback", has_side_effect=True, operand_output_aliases=aliases
    )
    new_token, *results = lowered(with_token, token, *operands, index=index)
    return new_token, results


def execute(call: HostCall, given: Sequence[Any], results: List[Any]) -> None:
    """Execute a call on XLA's memory.

    Args:
        call: the collective.
        given: the operands. They share the results' memory where XLA could arrange that.
        results: receive the results.
    """
    if not call.overwrites:
        for target, result in zip(results, call.run(given)):
            np.copyto(target, result)
        return
    for source, target in zip(given, results):
        if not np.may_share_memory(source, target):  # they are the same memory or apart
            np.copyto(target, source)
    call.overwrite(results)
