"""A rank that trains on balanced batches inside a control group, for unequal.py.

It computes: a sample is a number of products of a matrix and a vector, and nothing sleeps in place of work.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import List

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from peers.quotas import join

LAYER = 256


def arguments() -> argparse.Namespace:
    """Return what to train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--groups", nargs="*", help="control groups, by rank, to join")
    parser.add_argument("--result", type=Path, help="file that rank 0 writes")
    parser.add_argument("--speeds", nargs="+", help='"measure", or one number per rank')
    parser.add_argument("--steps", type=int)
    parser.add_argument("--global_batch", type=int)
    parser.add_argument("--passes", type=int, help="products of a matrix and a vector, per sample")
    parser.add_argument("--gradient_bytes", type=int)
    return parser.parse_args()


def main() -> None:
    """Train; rank 0 writes the seconds of each of its steps."""
    args = arguments()
    if args.groups:
        join(args.groups[int(os.environ["RANK"])])
    import numpy as np

    import ringcomm as rc

    rc.init()
    weights = np.random.default_rng(0).standard_normal((LAYER, LAYER)).astype(np.float32)
    images = np.random.default_rng(1).standard_normal((4096, LAYER)).astype(np.float32)
    gradient = np.zeros(max(LAYER * LAYER, args.gradient_bytes // 4), np.float32)
    layer = gradient[: LAYER * LAYER].reshape(LAYER, LAYER)
    speeds = args.speeds[0] if args.speeds[0] == "measure" else [float(speed) for speed in args.speeds]
    data = rc.balanced(len(images), global_batch=args.global_batch, speeds=speeds, drop_last=True)
    times: List[float] = []
    began_s = time.perf_counter()
    for mine in itertools.islice(itertools.chain.from_iterable(itertools.repeat(data)), args.steps):
        gradient[:] = 0.0
        for row in images[mine]:
            for _ in range(args.passes):
                row = np.tanh(weights @ row)
            layer += np.outer(row, row)
        rc.allreduce_(gradient, weight=len(mine))
        times.append(time.perf_counter() - began_s)
        began_s = time.perf_counter()
    if rc.rank() == 0:
        args.result.write_text(json.dumps(times))


if __name__ == "__main__":
    main()
