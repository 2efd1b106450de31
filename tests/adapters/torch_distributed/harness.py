"""Many checks on real processes, started once: a rank runs every ``check_*`` of a file, one after another.

    python harness.py FILES RANK SIZE STORE [CHECK]

Every check gets a :class:`Ranks`, with a group of each backend for the same processes. What a rank has to
say is a line of JSON per check on its standard output.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple

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
            pass


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
    """Start the processes and let them run some files' checks: what went wrong, by check ("" if nothing).

    Args:
        only: a part of the names of the checks that are run.
        without: parts of the names of checks that are not, separated by spaces.
        device: ``fake``: all tensors are taken for tensors of a device.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(HERE / "harness.py"), files]
        processes = [
            subprocess.Popen(
                [*command, str(rank), str(size), f"{folder}/store", only],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
                env={
                    **os.environ, "CHECKS_FOLDER": folder, "CHECKS_WITHOUT": without, "CHECKS_DEVICE": device,
                    "PYTHONPATH": str(ROOT),
                },
            )
            for rank in range(size)
        ]  # fmt: skip
        outcome: Dict[str, str] = {}
        try:
            for rank, process in enumerate(processes):
                out, err = process.communicate(timeout=LIMIT_S)
                seen = [json.loads(line[1:]) for line in out.splitlines() if line.startswith("@")]
                for name, problem in seen:
                    text = f"rank {rank}:\n{problem}" if problem else ""
                    outcome[name] = outcome.get(name, "") + text
                if os.environ.get("SHOW_TIMES") and rank == 0:
                    print(err)
                if process.returncode:
                    outcome["end"] = f"rank {rank} ended with {process.returncode}: {err[-3000:]}"
        finally:
            for process in processes:
                process.kill()
                process.wait()
                process.stdout.close()
                process.stderr.close()
    return outcome


def main() -> None:
    """Be one rank."""
    files, rank, size, path = sys.argv[1].split(), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    import torch
    import torch.distributed as dist

    import ringcomm.torch.distributed  # noqa: F401

    torch.set_num_threads(1)
    store = dist.FileStore(path, size)
    dist.init_process_group(
        "ringcomm", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30)
    )
    gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=30))
    ring = dist.group.WORLD
    checks = {name: check for file in files for name, check in checks_of(file).items()}
    if os.environ.get("CHECKS_DEVICE"):
        from tests.adapters.torch.fake_cuda import take_all_tensors_for_device_tensors

        take_all_tensors_for_device_tensors(seed=rank)
    without = os.environ.get("CHECKS_WITHOUT", "").split()
    for name, check in checks.items():
        if any(part in name for part in without):
            continue
        if len(sys.argv) > 5 and sys.argv[5] not in name:
            continue
        problem, started = "", time.perf_counter()
        try:
            check(Ranks(rank, size, ring, gloo, dist.PrefixStore("checks", store), name))
        except Exception:  # noqa: BLE001 - it is reported to the parent process
            problem = traceback.format_exc()
        print(f"{name}: {time.perf_counter() - started:.2f} s", file=sys.stderr)
        print("@" + json.dumps([name, problem]), flush=True)
        if problem:
            break  # the ranks may be out of step now
    if "checks_start.py" not in files:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
