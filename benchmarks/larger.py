"""Models divided among ranks, over ringcomm beside Gloo, in the same processes at the same time.

    python benchmarks/larger.py [--np 2] [--rounds 15] [--link 100mbit] [--output DIR] [--quick]

Three backends take turns, as in ddp.py: ringcomm over TCP, ringcomm as it comes (on one host it reads the
other rank's memory) and Gloo. Measured are

* a step of a pipeline (1F1B, 8 microbatches, activations and gradients of 1 MB each, a linear layer a stage),
  and the same with these messages compressed (Gloo's are not), with the error that a codec makes,
* a token of tensor parallelism: one row through 12 pairs of linear layers that are divided by columns and
  rows, so 12 sums of 1 KB, one after another, by PyTorch's ``parallelize_module``; and the same sums alone,
* a step of FSDP2: forward and backward pass of 4 linear layers of 4 MB each.

Rank 0 prints medians, and the median of the ratios to Gloo's time in the same round; the larger the better.
With --output also DIR/larger.json. --link (as root, on Linux) puts each rank on a host of its own, a network
namespace, with links of this speed both ways; the file is DIR/larger_RATE.json then.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, List

ROOT = Path(__file__).resolve().parents[1]
for place in (str(ROOT), str(Path(__file__).resolve().parent)):
    if place not in sys.path:
        sys.path.insert(0, place)

MICROBATCHES, PAIRS, WIDTH = 8, 12, 256
CODECS = ("bf16", "int8")
Step = Callable[[], Any]


def pipeline_step(group: Any) -> Step:
    """Send 1 MB to the next stage and back again, eight times."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, size = dist.get_rank(group), dist.get_world_size(group)
    stage = PipelineStage(nn.Linear(WIDTH, WIDTH), rank, size, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    inputs = torch.ones(MICROBATCHES * 1024, WIDTH)
    given = [inputs] if rank == 0 else []
    wanted = {"target": inputs} if rank == size - 1 else {}
    return lambda: schedule.step(*given, **wanted)


def errors_of_codecs() -> Dict[str, float]:
    """The error of a compressed message, relative to it: of what a transformer's layer computes."""
    import numpy as np
    import torch

    from ringcomm.group.message_coding import MessageCoder
    from ringcomm.ops import codec_number

    torch.manual_seed(1)
    layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, batch_first=True, dropout=0.0, norm_first=True)
    sent = layer(torch.randn(16, 64, WIDTH)).detach().numpy().ravel()
    coder, got, found = MessageCoder(), np.empty_like(sent), {}
    for name in CODECS:
        codes = coder.encode(codec_number(name), sent.view("u1").data)
        coder.decode(codec_number(name), codes, got.view("u1").data)
        found[name] = float(np.linalg.norm(got - sent) / np.linalg.norm(sent))
    return found


def token(group: Any) -> Step:
    """Compute one row of a network of which each rank has a part."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    # A name of its own: DTensor keeps what it has planned by mesh, and meshes of the same ranks and names are
    # equal, so another group's collectives would be called.
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(f"ranks of {group.group_name}",))
    pairs = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(PAIRS)]
    for pair in pairs:
        parallelize_module(pair, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    model, row = nn.Sequential(*pairs), torch.ones(1, WIDTH)

    def step() -> None:
        with torch.no_grad():
            model(row).sum().item()

    return step


def sums(group: Any) -> Step:
    """The sums of a token without anything else."""
    import torch
    import torch.distributed as dist

    row = torch.zeros(1, WIDTH)

    def step() -> None:
        for _ in range(PAIRS):
            dist.all_reduce(row, group=group)

    return step


def sharded_step(group: Any) -> Step:
    """Gather four layers twice, and reduce their gradients."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, "cpu")
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    inputs = torch.ones(4, 1024)
    return lambda: model(inputs).sum().backward()


def work(rank: int, size: int, folder: str, rounds: int, quick: bool) -> None:
    """Be one rank."""
    import warnings

    import ddp
    import torch
    import torch.distributed as dist

    from ringcomm.torch.distributed import compress_messages

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    groups, results = ddp.groups(), {}
    for what, make, calls in (
        ("pipeline step, 8 x 1 MB", pipeline_step, 1),
        ("token, 12 divided pairs of layers", token, 10),
        ("12 sums of 1 KB", sums, 10),
        ("FSDP2 step, 4 x 4 MB", sharded_step, 1),
    ):
        steps = {name: make(group) for name, group in groups.items()}
        results[what] = ddp.measure(steps, rounds, 1 if quick else 2 * calls)
        for codec in CODECS if make is pipeline_step else ():
            for name in ddp.BACKENDS[:2]:
                compress_messages(codec, groups[name])
            results[f"{what} as {codec}"] = ddp.measure(steps, rounds, 1 if quick else 2 * calls)
    dist.barrier()
    if rank == 0:
        Path(folder, "results").write_text(json.dumps(results))
    dist.destroy_process_group()


def run(size: int, rounds: int, quick: bool) -> Dict[str, Dict[str, List[float]]]:
    """Start the ranks; returns seconds per call by thing measured and backend."""
    import torch.multiprocessing

    os.environ["RINGCOMM_KEY"] = secrets.token_hex(32)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (size, folder, rounds, quick), nprocs=size)
        found: Dict[str, Dict[str, List[float]]] = json.loads(Path(folder, "results").read_text())
    return found


def run_on_hosts(size: int, rounds: int, quick: bool, rate: str) -> Dict[str, Dict[str, List[float]]]:
    """Start each rank on a host of its own, with links of this speed; returns the same as :func:`run`."""
    from tests.hosts.netlab import Lab

    reason = Lab.unavailable()
    if reason is not None:
        raise SystemExit(f"cannot make hosts here: {reason}")
    names = [f"node{number}" for number in range(size)]
    key = secrets.token_hex(32)
    with tempfile.TemporaryDirectory() as folder, Lab(*names, no_wlan=True, docker=False) as lab:
        command = [sys.executable, __file__, "--np", str(size), "--rounds", str(rounds), "--folder", folder]
        command += ["--quick"] if quick else []
        ranks = []
        for rank, name in enumerate(names):
            lab.shape(name, "eth", rate)
            variables = {**os.environ, "RINGCOMM_KEY": key, "GLOO_SOCKET_IFNAME": lab.iface(name)}
            ranks.append(lab.popen(name, [*command, "--rank", str(rank)], env=variables))
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise SystemExit(f"the ranks ended with the codes {codes}")
        found: Dict[str, Dict[str, List[float]]] = json.loads(Path(folder, "results").read_text())
    return found


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--np", type=int, default=2, help="number of ranks [2]")
    parser.add_argument("--rounds", type=int, default=15, help="how often everything is measured [15]")
    parser.add_argument("--output", type=Path, help="a directory for larger.json")
    parser.add_argument("--quick", action="store_true", help="only see that it works")
    parser.add_argument("--link", metavar="RATE", help="of hosts with links of this speed, as 100mbit")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    rounds = 2 if args.quick else args.rounds
    if args.rank is not None:
        work(args.rank, args.np, args.folder, rounds, args.quick)
        return
    if args.link:
        results = run_on_hosts(args.np, rounds, args.quick, args.link)
    else:
        results = run(args.np, rounds, args.quick)
    import ddp

    errors = errors_of_codecs()
    if args.output is not None:
        import machine

        args.output.mkdir(parents=True, exist_ok=True)
        facts = {"machine": machine.facts(), "np": args.np, "link": args.link, "seconds": results}
        facts["relative errors"] = errors
        file = args.output / (f"larger_{args.link}.json" if args.link else "larger.json")
        file.write_text(json.dumps(facts, indent=1) + "\n")
    print("\n".join(ddp.table(results)))
    print(", ".join(f"relative error of {codec}: {error:.2e}" for codec, error in errors.items()))


if __name__ == "__main__":
    main()
