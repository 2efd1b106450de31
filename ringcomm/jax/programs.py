"""Compiled programs with collectives: :func:`jit`, errors, and waiting for programs before leaving the job.

JAX starts a program with an ordered effect in Python, and hands it the token of the program before: 0.1 ms. A
program without effects is started in C++, in some microseconds. So :func:`jit` compiles the function as one
operation that has no effect outside. The first token is made in the program, and from there JAX passes it
from collective to collective as in any program, in ``scan``, ``while`` and ``cond`` too. Programs that a
thread has started are executed one after another on a device; JAX itself relies on that for its tokens.
"""

from __future__ import annotations

import functools
import logging
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Optional

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir

from .. import api
from .._adapter.graph_callbacks import is_in_order
from .._adapter.submit import cause_of, with_causes
from ..docstrings import documented
from .primitive import effect, latest, uncached, wait_for_programs

try:
    from jax._src.core import trace_state_clean
except ImportError:
    trace_state_clean = None

logger = logging.getLogger("ringcomm.jax")
program_p = Primitive("ringcomm_program")
program_p.multiple_results = True


@documented
def jit(fun: Optional[Callable[..., Any]] = None, **options: Any) -> Any:
    """``jax.jit`` for functions with collectives: JAX starts the program faster, by about 0.1 ms.

    Results, order and errors are those of ``jax.jit``. Within another function that is compiled,
    differentiated or vectorized, it is ``jax.jit``.

    Example::

        @hvd.jit
        def step(params, opt_state, batch): ...

    Args:
        fun: the function. None: the result is a decorator.
        options: arguments of ``jax.jit``, by keyword, such as ``donate_argnums``.

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
def _results(*_: Any, program: Any) -> List[Any]:
    return list(program.out_avals)


@program_p.def_impl
def _execute(*operands: Any, program: Any) -> List[Any]:
    """Run the program with ``jax.disable_jit()``."""
    return list(jaxpr_as_fun(program)(*operands))


def _lower(ctx: Any, *operands: Any, program: Any) -> Any:
    tokens = mlir.TokenSet.create([effect])
    return mlir.lower_fun(jaxpr_as_fun(program))(ctx.replace(tokens_in=tokens, tokens_out=None), *operands)


mlir.register_lowering(program_p, _lower, **uncached)


# ---- errors, and the end of the job ----------------------------------------------------------


@contextmanager
def typed_errors() -> Iterator[None]:
    """Raise the error of a failed collective in place of JAX's error that quotes it.

    Outside of compiled programs collectives raise their own errors (``PeerLostError``, ``MismatchError``, …).
    A compiled program runs them in XLA, which turns each into a ``JaxRuntimeError`` with the same text,
    raised where a result of the program is used. At the end of this ``with`` block programs in progress are
    waited for, so that their errors are raised here.

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
    """Wait for the programs that this thread has started: their collectives precede the next call.

    RingcommError (or an error of JAX): one of these programs has failed.
    """
    if not is_in_order():
        with with_causes():
            wait_for_programs()


api.before_leaving(_finish)
api.before_calls(_programs_first)
