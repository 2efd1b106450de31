"""How long training stands still when one of three machines dies: ringcomm beside torchrun over Gloo.

    python benchmarks/lost_host.py [--rounds 5] [--output benchmarks/results]

A round in which training has not gone on within 400 s is null in the result.

Three hosts (network namespaces, as root; see tests/hosts/netlab.py) at 1 Gbit/s train the same model of 25
million weights, with torchrun by PyTorch's DistributedDataParallel. In each round a new job is started, all
processes of the third host are killed, and the time from then until the two others have finished a step is
measured:

* ringcomm: an elastic job of ``ringrun``; the processes of the other hosts go on.
* torchrun: ``torchrun --nnodes 2:3 --max-restarts 3`` on each host, the rendezvous (c10d) on the first; its
  agents restart the processes of the other hosts, which read the weights that were saved last.

The first host is the one of torchrun's rendezvous in both: where that dies, torchrun's job ends.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

ROOT = Path(__file__).resolve().parents[1]
HOSTS = ("first", "second", "third")
LIMIT_S = 400.0
STEPS_BEFORE = 10

MODEL = """
import os, sys, time
import torch
import torch.distributed as dist
folder = sys.argv[1]
log = open(os.path.join(folder, os.uname().nodename + ".log"), "a", buffering=1)
model = torch.nn.Sequential(*[torch.nn.Linear(1600, 1600) for _ in range(10)])
def one_step(network, optimizer, data=torch.ones(8, 1600)):
    time.sleep(0.1)
    optimizer.zero_grad()
    network(data).square().mean().backward()
    optimizer.step()
"""

TORCHRUN = (
    MODEL
    + """
dist.init_process_group("gloo")
saved = os.path.join(folder, os.uname().nodename + ".pt")
if os.path.exists(saved):
    model.load_state_dict(torch.load(saved))
network = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
for step in range(100000):
    one_step(network, optimizer)
    print(time.time(), dist.get_world_size(), file=log)
    if step % 20 == 5:
        torch.save(model.state_dict(), saved + ".new")
        os.replace(saved + ".new", saved)
"""
)

RINGCOMM = (
    MODEL
    + """
import ringcomm.torch as hvd
hvd.init()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
@hvd.elastic.run
def train(state):
    while True:
        one_step(model, optimizer)
        state.commit()
        print(time.time(), hvd.size(), file=log)
train(hvd.elastic.TorchState(model=model, optimizer=optimizer))
"""
)


def steps_of(folder: Path, host: str, size: int) -> List[float]:
    """Return when a host has finished steps with so many ranks."""
    path = folder / f"{host}.log"
    lines = path.read_text().splitlines() if path.exists() else []
    found = [line.split() for line in lines]
    return [float(at) for at, ranks in (line for line in found if len(line) == 2) if int(ranks) == size]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Look until it is so.

    Raises:
        TimeoutError: it is not within the limit.
    """
    end_s = time.time() + LIMIT_S
    while not condition():
        if time.time() > end_s:
            raise TimeoutError(f"{what} took more than {LIMIT_S:g} s")
        time.sleep(0.02)


def torchrun(lab: Any, script: Path, folder: Path) -> List[subprocess.Popen[str]]:
    """Start an agent on each host. The hosts have no names in DNS, so their addresses are given."""
    address = {host: lab.addresses(host, "eth")[0] for host in HOSTS}
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": lab.iface(HOSTS[0]), "OMP_NUM_THREADS": "1"}
    common = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2:3", "--nproc-per-node=1",
        "--max-restarts=3", "--rdzv-id=job", "--rdzv-backend=c10d",
        f"--rdzv-endpoint={address[HOSTS[0]]}:29400",
    ]  # fmt: skip
    return [
        lab.popen(
            host, [*common, f"--rdzv-conf=is_host={int(host == HOSTS[0])}", f"--local-addr={address[host]}",
                   str(script), str(folder)],
            env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for host in HOSTS
    ]  # fmt: skip


def ringrun(lab: Any, script: Path, folder: Path) -> List[subprocess.Popen[str]]:
    """Start an elastic job."""
    command = [
        sys.executable, "-m", "ringrun", "--min-np", "2", "-np", "3", "-H", ",".join(HOSTS),
        "-x", "PYTHONPATH", "--threads", "1", sys.executable, str(script), str(folder),
    ]  # fmt: skip
    environment = {**os.environ, **lab.environ(), "PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}"}
    return [subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, text=True)]


def paused_s(lab: Any, name: str) -> float:
    """Seconds from the death of the third host until both others have finished a step; inf: over LIMIT_S."""
    start, source = {"ringcomm": (ringrun, RINGCOMM), "torchrun": (torchrun, TORCHRUN)}[name]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        script = folder / "train.py"
        script.write_text(source)
        running = start(lab, script, folder)
        try:
            wait_until(
                lambda: all(len(steps_of(folder, host, 3)) >= STEPS_BEFORE for host in HOSTS), "the start"
            )
            died_at = time.time()
            lab.kill_host(HOSTS[2])
            try:
                wait_until(lambda: all(steps_of(folder, host, 2) for host in HOSTS[:2]), "going on")
            except TimeoutError:
                return math.inf
            return max(steps_of(folder, host, 2)[0] for host in HOSTS[:2]) - died_at
        finally:
            for process in running:
                process.terminate()
            for process in running:
                process.wait(60)


def main() -> None:
    """Measure in turns, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, metavar="DIR", help="write DIR/lost_host.json")
    arguments = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "launcher")]
    from tests.hosts.netlab import Lab

    reason = Lab.unavailable()
    if reason is not None:
        sys.exit(f"this needs several hosts: {reason}")
    found: Dict[str, List[float]] = {"ringcomm": [], "torchrun": []}
    for _ in range(arguments.rounds):
        for name, times in found.items():
            with Lab(*HOSTS, no_wlan=HOSTS, docker=False) as lab:
                for host in HOSTS:
                    lab.shape(host, "eth", "1000mbit", burst="256kb")
                times.append(paused_s(lab, name))
            print(f"{name}: {times[-1]:.2f} s", flush=True)
    for name, times in found.items():
        print(f"{name}: median {statistics.median(times):.2f} s of {len(times)}")
    if arguments.output is not None:
        import torch

        known = {
            name: [each if math.isfinite(each) else None for each in times] for name, times in found.items()
        }
        facts = {"torch": torch.__version__, "hosts": len(HOSTS), "mbit_per_s": 1000, "limit_s": LIMIT_S,
                 "load": os.getloadavg(), "seconds": known}  # fmt: skip
        (arguments.output / "lost_host.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
