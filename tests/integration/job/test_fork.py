"""A fork of a rank's process: it shares the connections, so nothing that it does may reach them."""

from __future__ import annotations

import os
import signal
import warnings
from contextlib import ExitStack

import numpy as np
import pytest

from ringcomm.ops import Sum
from ringcomm.testing.cluster import run_ranks
from tests.support.service import together

LIMIT_S = 60


def forked(work) -> str:
    """Return what ``work`` returns in a fork of this process, or the error that it raises, as text."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that this process has threads
        pid = os.fork()
    if pid == 0:
        signal.alarm(LIMIT_S)  # instead of a wait for ever
        try:
            text = repr(work())
        except Exception as problem:  # noqa: BLE001 - the parent looks at it
            text = f"{type(problem).__name__}: {problem}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return text


def test_it_may_not_wait_for_an_operation_of_its_parent():
    """It has no engine thread, and would read what is sent to its parent."""

    def work(context):
        if context.rank == 1:
            context.barrier()
            context.engine.allreduce([np.ones(1)], Sum, "x").wait()
            return None
        array = np.ones(1)
        handle = context.engine.allreduce([array], Sum, "x")
        texts = [forked(handle.wait), forked(lambda: handle.wait(5.0))]
        context.barrier()
        handle.wait()
        return [array[0], *texts]

    (total, *texts), _ = run_ranks(2, work)
    assert total == 2.0
    for text in texts:
        assert text.startswith("Misuse: This process is a fork of rank 0 and shares its connections")


@pytest.mark.parametrize("transport", ["tcp", "shm", "auto"])
def test_when_it_ends_its_parent_remains_in_the_job(service, transport):
    """At the end of a program the default context is closed, in a fork that calls sys.exit() too."""
    made = service(2, transport=transport)
    with ExitStack() as stack:
        contexts = made.start_all(stack)
        for ok in (True, False):
            assert forked(lambda ok=ok: contexts[1].close("its program ended", ok)) == "None"
        sums = together(contexts, lambda context: context.allreduce(np.ones(50_000), Sum)[-1])
        assert sums == [2.0, 2.0]
        named = together(contexts, lambda context: context.engine.barrier("named").wait())
        assert named == [None, None]
    assert not made.texts("abort")
