"""How long an allreduce takes, from 8 bytes to 64 MB.

    ringrun -np 2 benchmarks/allreduce.py
    ringrun -np 3 -H localhost,jetson1,jetson2 benchmarks/allreduce.py --max-bytes 8000000

"bus" is what NCCL's tests call bus bandwidth: ``bytes / time * 2 (p - 1) / p``, the rate at which the
best possible algorithm would have to send. It can be compared between different numbers of ranks, and
with the speed of the network. Every size is checked once for the right sum before it is timed.
"""

import argparse
import time

import numpy as np

import ringcomm as rc

SIZES = (8, 64, 512, 4_000, 32_000, 256_000, 1_000_000, 4_000_000, 16_000_000, 64_000_000)


def measure(count, seconds):
    """Median and best time of an in-place float32 sum, as rank 0 sees it, and how often it ran."""
    data = np.full(count, rc.rank() + 1, np.float32)
    rc.allreduce_(data, op=rc.Sum)
    if not np.all(data == rc.size() * (rc.size() + 1) / 2):
        raise SystemExit(f"wrong sum of {count} elements on rank {rc.rank()}: {data}")
    data.fill(0)  # so that nothing overflows, however often it is summed
    times = []
    repeats, done = 3, 0
    while done < repeats:
        started = time.perf_counter()
        rc.allreduce_(data, op=rc.Sum)
        times.append(time.perf_counter() - started)
        done += 1
        if done == 3:  # rank 0 decides for all how many more there will be
            repeats = int(rc.broadcast_object(min(2000, max(5, seconds / min(times)))))
    return float(np.median(times)), min(times), done


def main():
    parser = argparse.ArgumentParser(description="Time ringcomm's allreduce.")
    parser.add_argument("--min-bytes", type=int, default=SIZES[0])
    parser.add_argument("--max-bytes", type=int, default=SIZES[-1])
    parser.add_argument("--seconds", type=float, default=0.5, help="time to spend on each size [0.5]")
    args = parser.parse_args()
    rc.init()
    if rc.rank() == 0:
        print(f"allreduce of float32, Sum, in place: {rc.size()} ranks on {rc.cross_size()} host(s)")
        print(f"{'bytes':>12}{'median':>14}{'best':>14}{'bus':>14}{'runs':>8}")
    for size in (size for size in SIZES if args.min_bytes <= size <= args.max_bytes):
        median, best, runs = measure(size // 4, args.seconds)
        if rc.rank() == 0:
            bus = size / median * 2 * (rc.size() - 1) / rc.size()
            print(f"{size:12d}{median * 1e6:11.1f} us{best * 1e6:11.1f} us{bus / 1e9:9.3f} GB/s{runs:8d}")


if __name__ == "__main__":
    main()
