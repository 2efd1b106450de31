"""A training program as a user might write it, which goes wrong in the way that it is told to.

python program.py WAY FOLDER [INIT_METHOD]
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ringcomm.torch.distributed  # noqa: F401


def go_wrong(way: str, folder: Path) -> None:
    """Be killed, freeze, come late or fail, the first time."""
    if way == "freeze":
        (folder / "frozen").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    if way == "kill" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    if way in ("late", "late in a pair"):
        time.sleep(4.0)
    if way == "raise":
        raise ValueError("bad sample in batch 3")


def main() -> None:
    """Train a little."""
    way, folder, *method = sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]
    dist.init_process_group(
        "ringcomm", init_method=method[0] if method else None,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    rank = dist.get_rank()
    if way == "kill":
        # torchrun ends the others within 0.1 s, before they could have learned what happened.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.manual_seed(rank)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    pair = dist.new_group([0, 1]) if way == "late in a pair" else None
    try:
        for step in range(6):
            if step == 3 and rank == 1:
                go_wrong(way, folder)
            if pair is not None and rank in (0, 1):
                dist.all_reduce(torch.ones(2), group=pair)
            model(torch.ones(2, 4) * rank).sum().backward()
            dist.all_reduce(torch.ones(1))
    except RuntimeError:
        (folder / f"told.{rank}").write_text(traceback.format_exc())
        raise
    dist.barrier()
    dist.destroy_process_group()
    (folder / f"done.{rank}").write_text("")


if __name__ == "__main__":
    main()
