"""Chooses how compiled programs call the host: :mod:`.buffers` where it works, else :mod:`.io_callbacks`."""

from __future__ import annotations

import importlib
import logging
import threading
from typing import Any, List, Optional, Sequence

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from .. import api
from ..errors import NotOfferedError

logger = logging.getLogger("ringcomm.jax")

TRIAL_S = 60.0
"""How long a trial may take, in seconds; it takes a tenth of a second."""

_lock = threading.Lock()
_chosen: Any = None


def chosen() -> Any:
    """The module that compiled programs use; the first call tries what works.

    Raises:
        NotInitializedError: ``init()`` has not been called, or ``shutdown()`` has.
        NotOfferedError: neither way works with this version of JAX.
    """
    global _chosen
    if _chosen is None:
        wanted = api.context().settings.jax_callbacks
        with _lock:
            if _chosen is None:
                _chosen = choose(["buffers", "io_callbacks"] if wanted == "auto" else [_MODULES[wanted]])
    return _chosen


_MODULES = {"buffers": "buffers", "io_callback": "io_callbacks"}


def choose(names: Sequence[str]) -> Any:
    """The first of some modules that works with this version of JAX.

    Raises:
        NotOfferedError: none of them does.
    """
    problems: List[str] = []
    for name in names:
        try:
            module = importlib.import_module(f"{__package__}.{name}")
            in_own_thread(module)
        except Exception as error:  # noqa: BLE001 - whatever a private name of JAX has become
            problems.append(f"{name}: {type(error).__name__}: {error}")
            continue
        if problems:
            logger.warning(
                "ringcomm.jax calls the host as io_callback does, which copies arrays, because the faster "
                "way does not work with JAX %s (%s)", jax.__version__, problems[0],
            )  # fmt: skip
        return module
    raise NotOfferedError(
        f"Collectives in compiled programs do not work with JAX {jax.__version__}: {'; '.join(problems)}"
    )


def in_own_thread(module: Any) -> None:
    """Run :func:`trial` in a thread of its own: JAX's state of tracing, and its tokens, are a thread's."""
    problem: Optional[BaseException] = None

    def run() -> None:
        nonlocal problem
        try:
            trial(module)
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            problem = error

    thread = threading.Thread(target=run, name="ringcomm-jax-trial", daemon=True)
    thread.start()
    thread.join(TRIAL_S)
    if thread.is_alive():
        raise TimeoutError(f"the trial did not end within {TRIAL_S:g} s")
    if problem is not None:
        raise problem


class _Trial:
    """A call of the host that communicates with no other rank, and records the order of calls."""

    overwrites = True

    def __init__(self) -> None:
        self.seen: List[float] = []

    def overwrite(self, arrays: Sequence[Any]) -> None:
        """Double arrays in place."""
        self.seen.append(float(arrays[0][0]))
        for array in arrays:
            array *= 2

    def run(self, arrays: Sequence[Any]) -> List[Any]:
        """Doubled arrays."""
        copies = [np.array(array) for array in arrays]
        self.overwrite(copies)
        return copies


def trial(module: Any) -> None:
    """Compile and run a small program with three calls of the host, and check results and order.

    Raises:
        AssertionError: they are wrong.
    """
    call = _Trial()
    primitive = Primitive("ringcomm_trial")
    primitive.multiple_results = True
    primitive.def_effectful_abstract_eval(lambda *operands: (list(operands), {module.effect}))
    mlir.register_lowering(primitive, lambda ctx, *operands: module.lower(ctx, call, *operands))

    def program(first: Any, second: Any) -> Any:
        def again(carry: Any, _: Any) -> Any:
            return primitive.bind(carry)[0], None

        (third,) = primitive.bind(second)
        fourth, _ = jax.lax.scan(again, first, None, length=2)
        return first, second, third, fourth

    values = np.full(3, 3, np.float32), np.full(2, 5, np.float32)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        results = [np.asarray(item) for item in jax.jit(program)(*values)]
    if [float(item[0]) for item in results] != [3.0, 5.0, 10.0, 12.0] or call.seen != [5.0, 3.0, 6.0]:
        raise AssertionError(f"results {results}, calls with {call.seen}")
