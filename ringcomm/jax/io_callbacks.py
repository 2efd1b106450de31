"""The way from a compiled program to the host, like ``io_callback``, with copies of arrays.

``io_callback`` would make JAX arrays of its operands inside the callback; with one thread of XLA, converting
these to NumPy waits for ever for that thread.
"""

from __future__ import annotations

from typing import Any, Sequence

import jax
import numpy as np
from jax.experimental import io_callback
from jax.interpreters import mlir

from .host_call import HostCall


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


def lower(ctx: Any, *operands: Any, call: HostCall) -> Sequence[Any]:
    """Emit the call of the host into a program, for every kind of device."""

    def on_host(*arrays: Any) -> Any:
        return tuple(call.run([np.asarray(array) for array in arrays]))

    results, token, _ = mlir.emit_python_callback(
        ctx, on_host, ctx.tokens_in.get(effect), list(operands), ctx.avals_in, ctx.avals_out,
        has_side_effect=True, returns_token=True,
    )  # fmt: skip
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({effect: token})))
    return list(results)
