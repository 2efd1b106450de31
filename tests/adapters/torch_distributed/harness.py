"""Many checks on real processes, started once: a rank runs every ``check_*`` of a file, one after another.

Every check gets a :class:`Ranks`, with a group of each backend for the same processes. What a rank has to
say is a message per check.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple

from tests.adapters.torch_distributed.forked import Forked

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
LIMIT_S = 300


class Ranks(NamedTuple):
    """The facts that a check has about its processes."""

    rank: int
    size: int
    ring: Any
    gloo: Any
    store: Any
    name: str

    def together(self, word: str) -> None:
        """Wait for all ranks without using either backend."""
        key = f"{self.name}/{word}"
        self.store.add(key, 1)
        while self.store.add(key, 0) < self.size:
            time.sleep(0.005)


def checks_of(file: str) -> Dict[str, Callable[[Ranks], None]]:
    """The checks in a file, in the order in which they stand there."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, HERE / file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return {name: thing for name, thing in vars(module).items() if name.startswith("check_")}


def names_of(file: str) -> List[str]:
    """The names of the checks in a file, without importing it."""
    lines = (HERE / file).read_text().splitlines()
    return [line[4:].split("(")[0] for line in lines if line.startswith("def check_")]


def run_checks(files: str, size: int, only: str = "", without: str = "", device: str = "") -> Dict[str, str]:
    """Start the processes and let them run some files' checks; return the error by check, "" if none. `only`
    is a part of the names that run, `without` has parts of names that do not, separated by spaces. `device`
    ``fake``: all tensors count as tensors of a device.
    """
    with tempfile.TemporaryDirectory() as folder:
        variables = {**os.environ, "CHECKS_FOLDER": folder, "PYTHONPATH": str(ROOT)}
        ranks: List[Forked] = []
        outcome: Dict[str, str] = {}
        try:
            for rank in range(size):
                arguments = (files, rank, size, f"{folder}/store", only, without, device)
                errors = Path(folder, f"errors.{rank}")
                ranks.append(Forked(be_rank, arguments, variables, errors, "checks_start.py" in files))
            for rank, process in enumerate(ranks):
                for name, problem in process.messages(LIMIT_S):
                    text = f"rank {rank}:\n{problem}" if problem else ""
                    outcome[name] = outcome.get(name, "") + text
                code = process.end(LIMIT_S)
                if os.environ.get("SHOW_TIMES") and rank == 0:
                    print(process.errors)
                if code:
                    outcome["end"] = f"rank {rank} ended with {code}: {process.errors[-3000:]}"
        finally:
            for process in ranks:
                process.close()
    return outcome


def check(files: str, size: int, without: str = "", device: str = "") -> None:
    """Fail if a check goes wrong or is missing; for the arguments see :func:`run_checks`."""
    outcome = run_checks(files, size, without=without, device=device)
    bad = [f"{name}: {problem}" for name, problem in outcome.items() if problem]
    assert not bad, "\n".join(bad)
    names = [name for file in files.split() for name in names_of(file)]
    expected = [name for name in names if not any(part in name for part in without.split())]
    assert sorted(outcome) == sorted(expected), outcome


def be_rank(
    connection: Any, files: str, rank: int, size: int, path: str, only: str, without: str, device: str
) -> None:
    """Run the checks as one rank."""
    import torch.distributed as dist

    import ringcomm.torch.distributed  # noqa: F401

    store = dist.FileStore(path, size)
    dist.init_process_group(
        "ringcomm", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30)
    )
    gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=30))
    ring = dist.group.WORLD
    checks = {name: check for file in files.split() for name, check in checks_of(file).items()}
    if device:
        from tests.adapters.torch.fake_cuda import take_all_tensors_for_device_tensors

        take_all_tensors_for_device_tensors(seed=rank)
    for name, check in checks.items():
        if only not in name or any(part in name for part in without.split()):
            continue
        problem, started = "", time.perf_counter()
        try:
            check(Ranks(rank, size, ring, gloo, dist.PrefixStore("checks", store), name))
        except Exception:  # noqa: BLE001 - it is reported to the parent process
            problem = traceback.format_exc()
        print(f"{name}: {time.perf_counter() - started:.2f} s", file=sys.stderr)
        connection.send((name, problem))
        if problem:
            break  # the ranks may be out of step now
    if "checks_start.py" not in files:
        dist.destroy_process_group()
