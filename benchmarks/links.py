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
from dataclasses import replace
from pathlib import Path
from typing import Dict, Tuple

import machine
from cells import RESULTS, duration, median, size_text
from compare import MB
from measure import Pace, in_turns
from peers.catalog import PEERS, ROOT

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
    pace = replace(pace, rounds=args.rounds or pace.rounds)
    facts, rows, code = machine.facts(), [], 0
    tasks = [{"kind": "collective", "collective": "allreduce", "bytes": size} for size in sizes]
    for network in args.networks:
        speeds = NETWORKS[network]
        hosts = [f"node{number}" for number in range(1, len(speeds) + 1)]
        with Lab(*hosts, no_wlan=True, docker=False) as lab:
            for host, speed in zip(hosts, speeds):
                lab.shape(host, "eth", f"{speed // 1_000_000}mbit", burst="256kb")
            environ = {"PATH": lab.environ()["PATH"], "GLOO_SOCKET_IFNAME": lab.iface(hosts[0])}
            options = ["-H", ",".join(hosts), "-x", "PYTHONPATH"]
            peers = [PEERS[name] for name in NAMES]
            found, good = in_turns(peers, len(hosts), lambda _: tasks, "{bytes}", pace, options, environ)
        code = max(code, int(not good))
        for size, seconds in found.items():
            least = bound(int(size), speeds)
            rows.append({"network": network, "bytes": int(size), "bound_s": least, "seconds": seconds})
            shown = ", ".join(f"{name} {duration(median(times))}" for name, times in seconds.items())
            print(f"{network}, {size_text(int(size))}: at least {duration(least)}, {shown}", flush=True)
    source = f"{facts['when']}, {facts['cpu']}, {facts['cores']} cores; seconds: the median of each round"
    args.output.write_text(json.dumps({"source": source, "rows": rows}, indent=1) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
