"""``ringrun --predict`` on examples of this project: from two hosts to others, and then measured there.

    sudo python benchmarks/scaling_examples.py [--examples NAME ...] [--output FILE]

Needs root and sshd (see tests/hosts/netlab.py, which makes the hosts), and the packages of the examples.
Each example is measured on 2 hosts at 100 Mbit/s, which gives predictions for numbers of hosts and links that
it was not measured with. The same command on those hosts, with links shaped to that rate, then gives the step
that was measured there. All hosts share this machine's cores, so the links are so slow that they bound steps.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Sequence

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

EXAMPLES = {
    "numpy_digits.py": ["--epochs", "30"],
    # In an epoch of fewer than 14 steps the epoch is what repeats: 1,437 images by 4 ranks.
    "torch_mnist.py": ["--epochs", "20", "--batch-size", "16"],
    "torch_digits.py": ["--epochs", "30"],
}
TARGETS = ((3, 20), (4, 50), (4, 20))
"""Hosts, and Mbit/s of their interfaces."""
CALIBRATED = (2, 100)
LIMIT_S = 240.0


def predict(lab: Any, hosts: Sequence[str], example: str, flags: Sequence[str]) -> str:
    """Return what ``--predict`` prints when it runs an example on these hosts."""
    command = [sys.executable, "-m", "ringrun", "--threads", "1", "-x", "PYTHONPATH", "--predict", *flags]
    command += ["-np", str(len(hosts)), "-H", ",".join(hosts), str(ROOT / "examples" / example)]
    command += EXAMPLES[example]
    environ = {**os.environ, "PATH": lab.environ()["PATH"], "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environ, timeout=LIMIT_S, capture_output=True, text=True)
    if done.returncode or "measured a step of" not in done.stderr:
        raise SystemExit(f"{example} on {len(hosts)} hosts was not predicted:\n{done.stdout}{done.stderr}")
    return done.stderr


def predicted_s(text: str, ranks: int) -> float:
    """The step of what ringcomm would choose, which is the first row of a number of ranks."""
    row = rf"^(?:ringrun:)? *{ranks} +\d+ .*? ([0-9.]+) s "
    found = re.search(row, text[text.index("predicted for") :], re.MULTILINE)
    if found is None:
        raise SystemExit(f"no row for {ranks} ranks in:\n{text}")
    return float(found[1])


def measured_s(text: str) -> float:
    """The step that was measured."""
    found = re.search(r"measured a step of ([0-9.e-]+) s", text)
    assert found is not None
    return float(found[1])


def study(lab: Any, names: Sequence[str], examples: Sequence[str]) -> List[Dict[str, Any]]:
    """These examples: first all predictions, then all measurements."""

    def shape(mbit: int) -> None:
        for host in names:
            lab.shape(host, "eth", f"{mbit}mbit", burst="64kb")

    rows: List[Dict[str, Any]] = []
    shape(CALIBRATED[1])
    for example in examples:
        for ranks, mbit in TARGETS:
            flags = ["--ranks", str(ranks), "--link", f"{mbit}mbit"]
            text = predict(lab, names[: CALIBRATED[0]], example, flags)
            rows.append({"example": example, "hosts": ranks, "mbit": mbit, "calibrated_s": measured_s(text),
                         "predicted_s": predicted_s(text, ranks)})  # fmt: skip
    for row in rows:
        shape(row["mbit"])
        text = predict(lab, names[: row["hosts"]], row["example"], ["--ranks", str(row["hosts"])])
        row.update(measured_s=measured_s(text), load=os.getloadavg()[0])
        row["error"] = row["predicted_s"] / row["measured_s"] - 1
        print(f"{row['example']:<16} {row['hosts']} hosts at {row['mbit']} Mbit/s: predicted "
              f"{row['predicted_s']:.4f} s, measured {row['measured_s']:.4f} s "
              f"({100 * row['error']:+.1f} %), load {row['load']:.1f}", flush=True)  # fmt: skip
    return rows


def main() -> int:
    """Run the study and write its rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    results = ROOT / "benchmarks" / "results" / "scaling" / "examples.json"
    parser.add_argument("--examples", nargs="+", choices=EXAMPLES, default=list(EXAMPLES), metavar="NAME",
                        help="only these; FILE keeps what it has of the others")  # fmt: skip
    parser.add_argument("--output", type=Path, default=results, metavar="FILE")
    args = parser.parse_args()
    from tests.hosts.netlab import Lab

    reason = Lab.unavailable()
    if reason is not None:
        raise SystemExit(f"cannot make hosts here: {reason}")
    names = [f"node{number}" for number in range(1, 1 + max(ranks for ranks, _ in TARGETS))]
    with Lab(*names, no_wlan=True, docker=False) as lab:
        rows = study(lab, names, args.examples)
    kept = json.loads(args.output.read_text()) if args.output.exists() else []
    rows += [row for row in kept if row["example"] not in args.examples]
    rows.sort(key=lambda row: list(EXAMPLES).index(row["example"]))
    args.output.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
