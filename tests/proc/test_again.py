"""Without ringrun: a job ends or fails and starts again in the same processes, and so does its rendezvous."""

from __future__ import annotations

from tests.proc.plain_jobs import run_plain

PROGRAM = """
import numpy as np
import ringcomm as rc
for generation in range(4):
    rc.init()
    assert rc.allreduce(np.full(3, 1.0), rc.Sum)[0] == 3
    if generation % 2 == 0:
        rc.shutdown()  # The rank that serves the rendezvous may be the first here, or the last.
        continue
    try:
        rc.allreduce(np.ones(3 + rc.rank()), name="differs")
    except rc.MismatchError as error:
        first = error
    try:
        rc.allreduce(np.ones(3))
    except rc.Misuse as error:
        assert "shutdown() and init() on every rank do" in str(error), error
    rc.shutdown()
rc.init()
assert rc.allreduce(np.full(3, 1.0), rc.Sum)[0] == 3
print(first)
"""


def test_after_a_shutdown_and_after_a_failure() -> None:
    """What the error advises works, whichever rank is the first to come back."""
    for code, output in run_plain(PROGRAM, 3):
        assert code == 0, output
        assert "The ranks do not make the same call" in output
