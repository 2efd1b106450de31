"""All-reduces between hosts beside Gloo: hosts made of namespaces, their links shaped to a given speed.

    sudo python benchmarks/links.py [--output FILE] [--quick] [--networks equal-1gbit …] [--rounds 3]

Needs root, sshd and nftables (see tests/hosts/netlab.py, which makes the hosts). For an allreduce of n bytes
over p hosts whose links have the speeds B, no algorithm takes less than
``max(n / min B, 2 (p - 1) n / sum B)``. The speeds are the line rates: TCP and Ethernet headers alone take
4 %. The shaper lets a burst of 256 KiB pass at once. Writes benchmarks/results/links.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Tuple

import machine
from cells import RESULTS, duration, median, size_text
from compare import MB, rounds_of
from measure import Collected, Pace, collect, run_command
from peers.catalog import HERE, PEERS, ROOT, Tools, spawned

sys.path.insert(0, str(ROOT))
from tests.hosts.netlab import Lab

GIGABIT, FAST = 1_000_000_000, 100_000_000
NETWORKS: Dict[str, Tuple[int, ...]] = {
    "equal-1gbit": (GIGABIT,) * 3,
    "equal-100mbit": (FAST,) * 3,
    "one-slow": (FAST, GIGABIT, GIGABIT, GIGABIT),
}
"""Name to the hosts' link speeds in bits per second."""
NAMES = ("ringcomm", "gloo")
PACE = Pace(budget_s=1.0, least=5, most=30, warmup=2, limit_s=600.0)
QUICK = Pace(budget_s=0.1, least=3, most=3, warmup=1, rounds=1)


def bound(size_bytes: int, speeds: Tuple[int, ...]) -> float:
    """The least time of an allreduce, in seconds."""
    bits, ranks = 8 * size_bytes, len(speeds)
    return max(bits / min(speeds), 2 * (ranks - 1) * bits / sum(speeds))


def run_once(
    lab: Lab, name: str, hosts: List[str], number: int, tasks: List[Dict[str, Any]], pace: Pace,
    into: Collected,
) -> None:  # fmt: skip
    """One run of one peer over one network."""
    peer = PEERS[name]
    with tempfile.TemporaryDirectory(prefix="ringbench-") as made:
        folder = Path(made)
        plan = folder / "plan.json"
        plan.write_text(json.dumps({"np": len(hosts), "pace": pace.plan(), "tasks": tasks}))
        worker = [sys.executable, str(HERE / peer.worker), "--plan", str(plan), "--output", str(folder)]
        environ = {**peer.environment(Tools()), "PATH": lab.environ()["PATH"]}
        if name == "ringcomm":
            launcher = [sys.executable, "-m", "ringrun", "-np", str(len(hosts)), "-H", ",".join(hosts)]
            command = [*launcher, "-x", "PYTHONPATH", *worker]
        else:
            commands = [
                lab.command(host, ["env", f"GLOO_SOCKET_IFNAME={lab.iface(host)}", *worker]) for host in hosts
            ]
            command = spawned(commands, folder)
        code, output = run_command(command, environ, pace.limit_s)
        collect(folder, name, len(hosts), number, tasks, into)
    print(f"round {number + 1} {name}: {'done' if code == 0 else output}", file=sys.stderr, flush=True)
    if code != 0:
        into.failures.append({"peer": name, "np": len(hosts), "exit": code, "output": output})


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "links.json", metavar="FILE")
    parser.add_argument("--networks", nargs="+", choices=tuple(NETWORKS), default=tuple(NETWORKS))
    parser.add_argument("--rounds", type=int, metavar="N", help="[3]")
    parser.add_argument("--quick", action="store_true", help="one short round: to see that it works")
    args = parser.parse_args()
    reason = Lab.unavailable()
    if reason is not None:
        raise SystemExit(f"cannot make hosts here: {reason}")
    pace, sizes = (QUICK, (4 * MB,)) if args.quick else (PACE, (4 * MB, 16 * MB, 64 * MB))
    facts, rows, collected = machine.facts(), [], Collected()
    for network in args.networks:
        speeds = NETWORKS[network]
        hosts = [f"node{number}" for number in range(1, len(speeds) + 1)]
        tasks = [{"kind": "collective", "collective": "allreduce", "bytes": size} for size in sizes]
        collected.samples.clear()
        with Lab(*hosts, no_wlan=True, docker=False) as lab:
            for host, speed in zip(hosts, speeds):
                lab.shape(host, "eth", f"{speed // 1_000_000}mbit", burst="256kb")
            for number in range(args.rounds or pace.rounds):
                for name in NAMES:
                    run_once(lab, name, hosts, number, tasks, pace, collected)
        for size, seconds in rounds_of(collected.samples, "{bytes}").items():
            least = bound(int(size), speeds)
            rows.append({"network": network, "bytes": int(size), "bound_s": least, "seconds": seconds})
            shown = ", ".join(f"{name} {duration(median(times))}" for name, times in seconds.items())
            print(f"{network}, {size_text(int(size))}: at least {duration(least)}, {shown}", flush=True)
    source = f"{facts['when']}, {facts['cpu']}, {facts['cores']} cores; seconds: the median of each round"
    args.output.write_text(json.dumps({"source": source, "rows": rows}, indent=1) + "\n")
    return collected.exit_code()


if __name__ == "__main__":
    sys.exit(main())
