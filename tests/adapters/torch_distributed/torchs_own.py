"""PyTorch's own tests for its backends (``torch.testing._internal.distributed``), over ringcomm or Gloo.

    python tests/adapters/torch_distributed/torchs_own.py [--backend gloo] [--ranks 3] [TEST ...]

Runs the tests that PyTorch runs with Gloo, and those of all_to_all, which it runs with MPI only; with
names only those. Every test gets processes of its own, which are forks of this one, so that PyTorch is
imported once. Prints a line of JSON per test (its name, ``passed``, ``skipped`` or ``failed``, seconds, and
why), and at the end how many there were.

PyTorch's tests need ``pip install expecttest``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import unittest
import warnings
from pathlib import Path
from typing import Any, List

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 100
"""For one test. PyTorch gives them 300 s, and a few more."""


class LikeGloo(str):
    """A backend's name that passes for "gloo" too: by it PyTorch's tests choose what to do."""

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def cases_of(backend: str, ranks: int) -> Any:
    """The class of PyTorch's tests, for a backend."""
    os.environ.update(
        BACKEND="gloo", WORLD_SIZE=str(ranks), DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(LIMIT_S),
        RINGCOMM_KEY=os.environ.get("RINGCOMM_KEY", "5eed" * 16), OMP_NUM_THREADS="1",
    )  # fmt: skip
    sys.path[:0] = [str(ROOT), str(ROOT / "launcher")]
    warnings.simplefilter("ignore")
    import torch
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed import distributed_test as theirs

    import ringcomm.torch.distributed

    theirs.BACKEND = LikeGloo(backend)  # read while tests run; what was read so far decided which there are
    if backend == "ringcomm":
        # The original refuses all backends but Gloo.
        theirs.dist.monitored_barrier = ringcomm.torch.distributed.monitored_barrier
    common_distributed.TIMEOUT_OVERRIDE.clear()

    class Cases(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    for test in vars(theirs.DistributedTest._DistTestBase).values():
        if getattr(test, "__unittest_skip_why__", "").startswith("Only MPI supports"):
            test.__unittest_skip__ = False
    return Cases


class Report(unittest.TestResult):
    """Prints what became of each test."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"passed": 0, "skipped": 0, "failed": 0}

    def startTest(self, test: Any) -> None:  # noqa: N802 - unittest's name
        super().startTest(test)
        self.began = time.monotonic()

    def report(self, test: Any, outcome: str, why: str = "") -> None:
        name = test.id().rpartition(".")[2]
        self.counts[outcome] += 1
        print(json.dumps([name, outcome, round(time.monotonic() - self.began, 2), why]), flush=True)

    def addSuccess(self, test: Any) -> None:  # noqa: N802
        self.report(test, "passed")

    def addSkip(self, test: Any, reason: str) -> None:  # noqa: N802
        self.report(test, "skipped", reason)

    def addError(self, test: Any, err: Any) -> None:  # noqa: N802
        self.report(test, "failed", str(err[1]))

    addFailure = addError  # noqa: N815


def main(arguments: List[str]) -> int:
    """Run them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", choices=("ringcomm", "gloo"), default="ringcomm")
    parser.add_argument("--ranks", type=int, default=3, help="PyTorch's own choice for Gloo is 3")
    parser.add_argument("tests", nargs="*")
    options = parser.parse_args(arguments)
    cases = cases_of(options.backend, options.ranks)
    names = options.tests or unittest.defaultTestLoader.getTestCaseNames(cases)
    result = Report()
    unittest.TestSuite(map(cases, names)).run(result)
    print(", ".join(f"{count} {outcome}" for outcome, count in result.counts.items()))
    return 1 if result.counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
