"""Programs in progress: the errors of their collectives, and waiting for them before leaving the job."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import Iterator

from .. import api
from .._adapter.calls_in_order import is_inside
from .._adapter.submit import cause_of, with_causes
from . import started

logger = logging.getLogger("ringcomm.jax")


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
        started.wait()


def _finish() -> None:
    """Wait for programs in progress: their collectives need this rank's connections."""
    try:
        started.wait()
    except Exception as error:  # noqa: BLE001 - of a collective; where its results are used it is raised too
        logger.warning("A collective of a JAX program failed: %s", cause_of(error) or error)


def _programs_first() -> None:
    """Wait for the programs that this thread has started: their collectives precede the next call.

    RingcommError (or an error of JAX): one of these programs has failed.
    """
    if not is_inside():
        with with_causes():
            started.wait()


api.before_leaving(_finish)
api.before_calls(_programs_first)
