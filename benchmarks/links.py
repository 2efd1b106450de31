"""How much of a slow network ringcomm uses: hosts made of namespaces, their links shaped to a given speed.

    python benchmarks/links.py --output DIR [--quick] [--sizes 4M 16M 64M] [--networks equal-1gbit …]
                               [--peers ringcomm gloo] [--rounds 3]

Needs root, sshd and nftables (see tests/hosts/netlab.py, which makes the hosts). Networks:

* ``equal-1gbit`` and ``equal-100mbit``: three hosts with links of that speed;
* ``one-slow``: four hosts, one link of 100 Mbit/s and three of 1 Gbit/s.

share = bound / measured. For an allreduce of n bytes over p hosts whose links have the speeds B, no
algorithm takes less than ``max(n / min B, 2 (p - 1) n / sum B)``; on equal links that is
``2 (p - 1) / p · n / B``. The speeds are the line rates: TCP and Ethernet headers alone take 4 %. The shaper
lets a burst of 256 KiB pass at once; "less burst" takes that off the bound, as if it had been saved up before
every call, so the truth lies between the two.

Writes DIR/links.json and DIR/links.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, Dict, Iterator, List, Sequence, Tuple

import machine
import report
from compare import MB, quiet, size_argument
from measure import Collected, Pace, Sample, collect, medians, run_command, speedups
from peers.catalog import HERE, ROOT, Command, Peer, Tools, choose, spawned

sys.path.insert(0, str(ROOT))
from tests.hosts.netlab import Lab

Speeds = Tuple[int, ...]
GIGABIT, FAST = 1_000_000_000, 100_000_000
NETWORKS: Dict[str, Speeds] = {
    "equal-1gbit": (GIGABIT,) * 3,
    "equal-100mbit": (FAST,) * 3,
    "one-slow": (FAST, GIGABIT, GIGABIT, GIGABIT),
}
"""Name to the hosts' link speeds in bits per second."""
PEERS = ("ringcomm", "gloo")
SIZES = (4 * MB, 16 * MB, 64 * MB)
QUICK_SIZES = (4 * MB,)
BURST_BYTES = 256 * 1024
PACE = Pace(budget_s=1.0, least=5, most=30, warmup=2, limit_s=600.0)
QUICK = Pace(budget_s=0.1, least=3, most=3, warmup=1, rounds=1, pause_s=0.0)


def host_names(speeds: Speeds) -> List[str]:
    """One host per link."""
    return [f"node{number}" for number in range(1, len(speeds) + 1)]


def bound(size_bytes: int, speeds: Speeds) -> float:
    """The least time of an allreduce, in seconds."""
    bits, ranks = 8 * size_bytes, len(speeds)
    return max(bits / min(speeds), 2 * (ranks - 1) * bits / sum(speeds))


def shape(lab: Lab, speeds: Speeds) -> None:
    """Give the hosts' links these speeds."""
    for host, speed in zip(host_names(speeds), speeds):
        lab.shape(host, "eth", f"{speed // 1_000_000}mbit", burst=f"{BURST_BYTES // 1024}kb")


def line_share(lab: Lab, speeds: Speeds, seconds: float) -> float:
    """Return what a plain TCP stream between the first two hosts reaches, both ways at once."""
    slower = min(speeds[:2])
    total = int(slower / 8 * seconds)
    with tempfile.TemporaryDirectory(prefix="ringbench-") as name:
        store, (first, second) = Path(name) / "port", host_names(speeds)[:2]
        address = lab.addresses(first)[0]
        command = [sys.executable, str(HERE / "run_stream.py"), str(store)]
        with lab.popen(first, [*command, "listen", address, str(total)]) as server:
            try:
                done = lab.run(second, [*command, "connect", address, str(total)], timeout=60 + 5 * seconds)
                server.wait(30)
            finally:
                server.kill()
    return float(done.stdout) * 8 / slower


def command_on(lab: Lab, peer: Peer, hosts: Sequence[str], worker: Command, output: Path) -> Command:
    """The command that runs a worker on every host."""
    if peer.worker == "run_ringcomm.py":
        launcher = [sys.executable, "-m", "ringrun", "-np", str(len(hosts)), "-H", ",".join(hosts)]
        return [*launcher, "-x", "PYTHONPATH", *worker]
    inside = [["env", f"GLOO_SOCKET_IFNAME={lab.iface(host)}", *worker] for host in hosts]
    return spawned([lab.command(host, command) for host, command in zip(hosts, inside)], output)


def run_once(
    lab: Lab, peer: Peer, network: str, number: int, tasks: List[Dict[str, Any]], pace: Pace, into: Collected
) -> None:
    """One run of one peer over one network."""
    hosts = host_names(NETWORKS[network])
    with tempfile.TemporaryDirectory(prefix="ringbench-") as name:
        directory = Path(name)
        plan = directory / "plan.json"
        plan.write_text(json.dumps({"np": len(hosts), "pace": pace.plan(), "tasks": tasks}))
        worker = [sys.executable, str(HERE / peer.worker), "--plan", str(plan), "--output", str(directory)]
        environ = {**peer.environment(Tools()), "PATH": lab.environ()["PATH"]}
        # Only before: the ranks that sshd starts are not our children, so they would count as others.
        into.others.append(round(machine.wait_for_pause(pace.pause_s), 3))
        command = command_on(lab, peer, hosts, worker, directory)
        code, output = run_command(command, environ, pace.limit_s)
        collect(directory, peer.name, len(hosts), number, tasks, into)
    print(
        f"{network} round {number + 1} {peer.name}: {'done' if code == 0 else output}",
        file=sys.stderr,
        flush=True,
    )
    if code != 0:
        into.failures.append({"peer": peer.name, "np": len(hosts), "round": number, "tasks": network,
                              "exit": code, "output": output, "final": False})  # fmt: skip


Key = Tuple[str, int, str]


def _key(sample: Sample) -> Key:
    return sample.task["network"], sample.task["bytes"], sample.peer


def summary(samples: Sequence[Sample]) -> List[Dict[str, Any]]:
    """One record per network, size and peer."""
    times = medians(samples, _key)
    ratios = speedups(samples, _key, lambda key: (*key[:2], "gloo"))
    rows = []
    for key, seconds in times.items():
        speeds = NETWORKS[key[0]]
        least = bound(key[1], speeds)
        burst_s = 8 * BURST_BYTES / min(speeds)
        rows.append({
            "network": key[0], "bytes": key[1], "peer": key[2], "seconds": seconds, "bound_s": least,
            "share": least / seconds, "share_less_burst": (least - burst_s) / seconds,
            "times_gloo": ratios.get(key),
        })  # fmt: skip
    return rows


def markdown(data: Dict[str, Any]) -> str:
    """The report."""
    collected = data["collected"]
    noise = machine.noise_line(data["quiet"], collected["others"], "before")
    lines = report.heading("Allreduce over shaped links", data["machine"], noise)
    lines += report.version_lines(collected["versions"], data["left_out"])
    about = (__doc__ or "").partition("Networks:\n\n")[2].partition("\n\nWrites")[0]
    lines += [*about.splitlines(), ""]
    for network in report.ordered(row["network"] for row in data["summary"]):
        speeds = ", ".join(f"{speed // 1_000_000}" for speed in NETWORKS[network])
        rows = [
            [report.size_text(row["bytes"]), row["peer"], report.time_text(row["seconds"]),
             report.time_text(row["bound_s"]), f"**{row['share']:.3f}**", f"{row['share_less_burst']:.3f}",
             report.ratio_text(row["times_gloo"]) if row["times_gloo"] else "–"]
            for row in sorted(data["summary"], key=lambda row: (row["bytes"], PEERS.index(row["peer"])))
            if row["network"] == network
        ]  # fmt: skip
        lines += [f"## {network}: {speeds} Mbit/s", ""]
        lines += [
            f"A plain TCP stream, both ways at once: {data['line'][network]:.3f} of the (slower) line.",
            "",
        ]
        head = ["size", "peer", "time", "bound", "share", "less burst", "× gloo"]
        lines += report.table(head, rows)
    return "\n".join(lines + report.failure_lines(collected["failures"]))


@contextlib.contextmanager
def laboratory(networks: Sequence[str]) -> Iterator[Lab]:
    """The hosts of the largest network."""
    reason = Lab.unavailable()
    if reason is not None:
        raise SystemExit(f"cannot make hosts here: {reason}")
    largest = max((NETWORKS[name] for name in networks), key=len)
    with Lab(*host_names(largest), no_wlan=True, docker=False) as lab:
        yield lab


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )  # fmt: skip
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--networks", nargs="+", choices=tuple(NETWORKS), default=tuple(NETWORKS), metavar="NAME"
    )
    parser.add_argument("--peers", nargs="+", choices=PEERS, metavar="NAME", help="ringcomm, gloo [both]")
    parser.add_argument("--sizes", type=size_argument, nargs="+", metavar="BYTES", help="[4M 16M 64M]")
    parser.add_argument("--rounds", type=int, metavar="N", help="[3]")
    parser.add_argument("--quick", action="store_true", help="one short round: to see that it works")
    parser.add_argument(
        "--wait", type=float, default=120.0, metavar="S", help="seconds to wait for quiet [120]"
    )
    args = parser.parse_args()
    pace = QUICK if args.quick else PACE
    sizes = args.sizes or (QUICK_SIZES if args.quick else SIZES)
    peers, left_out = choose(args.peers, Tools()) if args.peers else _installed()
    data: Dict[str, Any] = {"quiet": quiet(args), "machine": machine.facts(), "pace": asdict(pace),
                            "left_out": left_out, "line": {}}  # fmt: skip
    collected = Collected()
    try:
        with laboratory(args.networks) as lab:
            for network in args.networks:
                shape(lab, NETWORKS[network])
                data["line"][network] = line_share(lab, NETWORKS[network], 1.0 if args.quick else 4.0)
                tasks = [{"kind": "collective", "collective": "allreduce", "bytes": size, "network": network}
                         for size in sizes]  # fmt: skip
                for number in range(args.rounds or pace.rounds):
                    for peer in peers:
                        run_once(lab, peer, network, number, tasks, pace, collected)
    finally:
        data["collected"] = collected.raw()
        data["summary"] = summary(collected.samples)
        text = markdown(data)
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "links.json").write_text(json.dumps(data))
        (args.output / "links.md").write_text(text)
    print(text)
    return collected.exit_code()


def _installed() -> Tuple[List[Peer], Dict[str, str]]:
    chosen, left_out = choose(None, Tools())
    return [peer for peer in chosen if peer.name in PEERS], {
        name: reason for name, reason in left_out.items() if name in PEERS
    }


if __name__ == "__main__":
    sys.exit(main())
