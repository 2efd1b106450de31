"""ringcomm.jax beside JAX's own collectives over Gloo: all-reduces in programs, in the same processes.

    ringrun -np 2 benchmarks/jax_collectives.py                        1 KB, 1 MB, 64 MB
    ringrun -np 2 benchmarks/jax_collectives.py --endure 200           200 times two arguments of 64 MB

The first compares ``hvd.psum`` in ``hvd.jit``, in ``jax.jit`` and outside of both, and ``jax.lax.psum`` in
``shard_map`` over the ranks' devices, in turns. In programs the array is computed first, as gradients
are. ``RINGCOMM_JAX_CALLBACKS=io_callback`` measures the slower way to the host.
The second prints the number of runs that ended: a deadlock between XLA's threads and the host would stop it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ringcomm.jax as hvd
from ringcomm.jax import mechanism

SIZES = (1024, 1_000_000, 64_000_000)
BUDGET_S = 2.5


def gloo(items: int) -> Callable[[], Any]:
    """JAX's own all-reduce of as many float32, over one device of each rank."""
    mesh = Mesh(np.asarray(jax.devices()), ("ranks",))
    over = NamedSharding(mesh, PartitionSpec("ranks"))
    whole = jax.make_array_from_process_local_data(over, np.ones((1, items), np.float32))
    reduce = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x * 2, "ranks"), mesh=mesh, in_specs=PartitionSpec("ranks"),
            out_specs=PartitionSpec(),
        )
    )  # fmt: skip
    return lambda: reduce(whole)


def contestants(items: int) -> Dict[str, Callable[[], Any]]:
    """Return what is compared, by name."""
    x = jnp.ones(items)
    started, compiled = hvd.jit(lambda x: hvd.psum(x * 2)), jax.jit(lambda x: hvd.psum(x * 2))
    return {
        "ringcomm, in hvd.jit": lambda: started(x),
        "ringcomm, in jax.jit": lambda: compiled(x),
        "ringcomm, outside of jit": lambda: hvd.psum(x),
        "Gloo of JAX, in jit": gloo(items),
    }


def measure(items: int, rounds: int) -> Dict[str, List[float]]:
    """The times of each contestant in seconds, in turns; the same number of calls on all ranks."""
    calls = contestants(items)
    times: Dict[str, List[float]] = {name: [] for name in calls}
    for call in calls.values():
        started = time.perf_counter()
        for _ in range(3):
            jax.block_until_ready(call())
    each_s = hvd.broadcast_object((time.perf_counter() - started) / 3)
    count = max(3, min(300, int(BUDGET_S / rounds / each_s)))
    for _ in range(rounds):
        for name, call in calls.items():
            hvd.barrier()
            for _ in range(count):
                started = time.perf_counter()
                jax.block_until_ready(call())
                times[name].append(time.perf_counter() - started)
    return times


def compare(rounds: int, output: Any, machine: str) -> None:
    """Measure all sizes and print a table."""
    jax.distributed.initialize()
    result: Dict[str, Any] = {
        "machine": machine, "jax": jax.__version__, "ranks": hvd.size(),
        "callbacks": mechanism.chosen().__name__.rpartition(".")[2],
        "median_us": {}, "fastest_tenth_us": {},
    }  # fmt: skip
    for size in SIZES:
        times = {name: sorted(item) for name, item in measure(size // 4, rounds).items()}
        medians = {name: 1e6 * statistics.median(item) for name, item in times.items()}
        result["median_us"][str(size)] = {name: round(value, 1) for name, value in medians.items()}
        result["fastest_tenth_us"][str(size)] = {
            name: round(1e6 * item[len(item) // 10], 1) for name, item in times.items()
        }
        if hvd.rank() == 0:
            print(f"{size:>10} B  " + "   ".join(f"{name} {value:.0f} us" for name, value in medians.items()))
    if hvd.rank() == 0 and output:
        output.write_text(json.dumps(result, indent=1) + "\n")
    hvd.barrier()
    jax.distributed.shutdown()


def endure(times: int) -> None:
    """Reduce two arguments of 64 MB again and again, with work for XLA's threads before and after."""
    x, y = jnp.ones(16_000_000), jnp.full(16_000_000, 2.0)
    step = jax.jit(lambda x, y: hvd.pmean((x * 1.0 + 0.0, y)))
    for turn in range(1, times + 1):
        x, y = step(x, y)
        if hvd.rank() == 0 and turn % 20 == 0:
            print(f"{turn} of {times} runs", flush=True)
    np.testing.assert_array_equal(np.asarray(x[:5]), np.ones(5))
    np.testing.assert_array_equal(np.asarray(y[:5]), np.full(5, 2.0))
    if hvd.rank() == 0:
        print(f"all {times} runs have ended")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--endure", type=int, metavar="N", help="only reduce two arguments of 64 MB N times")
    parser.add_argument("--rounds", type=int, default=5, help="how often each contestant has its turn [5]")
    parser.add_argument("--machine", default="", help="a description for the output")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where the medians go, as JSON")
    args = parser.parse_args()
    hvd.init()
    if args.endure:
        endure(args.endure)
    else:
        compare(args.rounds, args.output, args.machine)


if __name__ == "__main__":
    main()
