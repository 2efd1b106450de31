"""Process groups for tests: ranks that are threads, and processes that run some files' ``check_*``."""

from __future__ import annotations

import importlib
import os
import re
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

from tests.adapters.torch_distributed.forked import Forked

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 300


def on_ranks(function: Callable[[Any], Any], size: int, ranks: Optional[Sequence[int]] = None) -> List[Any]:
    """Call ``function(group)`` on every rank of a new group in threads; `ranks`: their numbers in the job."""
    import torch.distributed as dist

    from ringcomm.torch.distributed import ProcessGroupRingcomm

    store, numbers = dist.HashStore(), list(range(size) if ranks is None else ranks)

    def work(rank: int) -> Any:
        group = ProcessGroupRingcomm(store, rank, numbers, timedelta(seconds=90), "test", False)
        try:
            return function(group)
        finally:
            group.shutdown()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))


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


def check(
    files: str, size: int, only: str = "", without: str = "", device: str = "", lost: Optional[int] = None
) -> None:
    """Run some files' checks on processes, and fail if one goes wrong or is missing. `only` is a part of the
    names that run, `without` has parts of names that do not, separated by spaces. `device` ``fake``: all
    tensors count as tensors of a device. `lost` is the rank that is killed at the end.
    """
    outcome: Dict[str, str] = {}
    ranks: List[Forked] = []
    with tempfile.TemporaryDirectory() as folder:
        variables = {**os.environ, "CHECKS_FOLDER": folder, "PYTHONPATH": str(ROOT)}
        try:
            for rank in range(size):
                arguments = (files, rank, size, f"{folder}/store", only, without, device)
                errors = Path(folder, f"errors.{rank}")
                ranks.append(Forked(be_rank, arguments, variables, errors))
            for rank, process in enumerate(ranks):
                for name, problem in process.messages(LIMIT_S):
                    outcome[name] = outcome.get(name, "") + (f"rank {rank}:\n{problem}" if problem else "")
                code = process.end(LIMIT_S)
                if rank == 0:
                    print(process.errors)  # how long each check took
                if code != (-9 if rank == lost else 0):
                    outcome["end"] = f"rank {rank} ended with {code}: {process.errors[-3000:]}"
        finally:
            for process in ranks:
                process.close()
    bad = [f"{name}: {problem}" for name, problem in outcome.items() if problem]
    assert not bad, "\n".join(bad)
    texts = [Path(__file__).with_name(file).read_text() for file in files.split()]
    names = re.findall(r"^def (check_\w+)", "\n".join(texts), re.MULTILINE)
    expected = [name for name in names if runs(name, only, without)]
    assert sorted(outcome) == sorted(expected), outcome


def runs(name: str, only: str, without: str) -> bool:
    """Return whether a check is to run."""
    return only in name and not any(part in name for part in without.split())


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
    if device:
        from tests.adapters.torch.fake_cuda import take_all_tensors_for_device_tensors

        take_all_tensors_for_device_tensors(seed=rank)
    for file in files.split():
        module = importlib.import_module(f"tests.adapters.torch_distributed.{Path(file).stem}")
        for name, act in list(vars(module).items()):
            if not name.startswith("check_") or not runs(name, only, without):
                continue
            problem, started = "", time.perf_counter()
            try:
                act(Ranks(rank, size, ring, gloo, dist.PrefixStore("checks", store), name))
            except Exception:  # noqa: BLE001 - it is reported to the parent process
                problem = traceback.format_exc()
            print(f"{name}: {time.perf_counter() - started:.2f} s", file=sys.stderr)
            connection.send((name, problem))
            if problem:
                os._exit(1)  # the ranks may be out of step now
    if "checks_start.py" not in files:
        dist.destroy_process_group()


def meet(connection: Any, rank: int, size: int, port: int) -> None:
    """Sum ones over a group that meets at a store, and send the sum or the error to the parent process."""
    import torch
    import torch.distributed as dist

    import ringcomm.torch.distributed  # noqa: F401
    from ringcomm.errors import RingcommError

    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=30))
    try:
        dist.init_process_group(
            "ringcomm", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60)
        )
        ones = torch.ones(1000, dtype=torch.float64)
        dist.all_reduce(ones)
        connection.send(f"sum {float(ones[0])}")
        dist.destroy_process_group()
    except RingcommError as problem:
        connection.send(f"{type(problem).__name__} {problem}")
