"""Messages between two hosts: torch.distributed over ringcomm and over Gloo, and Open MPI.

    python benchmarks/messages.py --link 1gbit --output DIR --mpi4py-openmpi DIR

As root, on Linux. The hosts are network namespaces with links of that speed both ways. Writes
DIR/messages_RATE.json: round trips of 8 bytes to 16 MB, in the form of compare.py's results. On one host:
``compare.py --collectives message``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Dict

import machine
from compare import KB, MB, batch_of, common_arguments, pace_of, quiet, tools_of
from measure import Collected, medians, round_robin
from peers.catalog import ROOT, TCP_OPENMPI, Command, Peer, choose, python, spawned

sys.path.insert(0, str(ROOT))
from tests.hosts.netlab import Lab

HOSTS = ("node0", "node1")
NAMES = ("ringcomm-torch", "gloo", "openmpi-tcp")
SIZES = (8, KB, 64 * KB, MB, 16 * MB)


def on_hosts(peer: Peer, lab: Lab) -> Peer:
    """The same peer, each of whose ranks runs on a host of its own."""
    interface, hosts = lab.iface(HOSTS[0]), ",".join(HOSTS)

    def start(ranks: int, worker: Command, output: Path) -> Command:
        if peer.name == "gloo":
            return spawned([lab.command(host, worker) for host in HOSTS], output)
        if peer.mpi:
            # Not bound: it would bind a rank of each host to the first core, which is the same one here.
            only = ["--bind-to", "none"]
            only += ["--mca", "btl_tcp_if_include", interface, "--mca", "oob_tcp_if_include", interface]
            command = ["mpirun.openmpi", "--allow-run-as-root", "--host", hosts, *TCP_OPENMPI, *only]
            return lab.command(HOSTS[0], [*command, "-x", "PYTHONPATH", "-np", str(ranks), *worker])
        return [*python("-m", "ringrun", "-np", str(ranks), "-H", hosts), "-x", "BACKEND", *worker]

    environ = {**peer.environ, "PATH": lab.environ()["PATH"]}
    if peer.name == "gloo":
        environ["GLOO_SOCKET_IFNAME"] = interface
    elif not peer.mpi:
        environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "launcher")])
    return replace(peer, start=start, environ=environ)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )  # fmt: skip
    common_arguments(parser)
    parser.add_argument("--link", metavar="RATE", required=True, help="speed of the links, as 100mbit")
    args = parser.parse_args()
    reason = Lab.unavailable()
    if reason is not None:
        raise SystemExit(f"cannot make hosts here: {reason}")
    tools, pace = tools_of(args), pace_of(args)
    peers, _ = choose(args.peers or NAMES, tools)
    data: Dict[str, Any] = {"quiet": quiet(args), "machine": machine.facts(), "pace": asdict(pace)}
    collected = Collected()
    with Lab(*HOSTS, no_wlan=True, docker=False) as lab:
        for host in HOSTS:
            lab.shape(host, "eth", args.link)
        placed = [on_hosts(peer, lab) for peer in peers]
        round_robin(placed, tools, len(HOSTS), [batch_of("message", SIZES)], pace, collected)
    found = medians(collected.samples, lambda sample: (sample.task["bytes"], sample.peer))
    data["summary"] = [
        {"bytes": size_bytes, "peer": name, "seconds": seconds}
        for (size_bytes, name), seconds in found.items()
    ]
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / f"messages_{args.link}.json").write_text(json.dumps(data, indent=1) + "\n")
    for (size_bytes, name), seconds in found.items():
        print(f"{size_bytes:>9} bytes, {name}: {1e6 * seconds:.0f} us")
    return collected.exit_code()


if __name__ == "__main__":
    sys.exit(main())
