"""A worker of MXNet's ``dist_sync`` KVStore: pushes and pulls buckets, and takes the time.

With ``DMLC_ROLE`` set to ``scheduler`` or ``server``, importing MXNet runs that and ends the process. This
file needs MXNet 1.9.1 with numpy 1.23.5, and nothing else.
"""

from __future__ import annotations

import json
import sys
import time

import mxnet as mx


def main() -> None:
    """Run the steps; worker 0 prints the times."""
    plan = json.loads(sys.argv[1])
    store = mx.kv.create("dist_sync")
    arrays = [mx.nd.ones((length // 4,)) for length in plan["buckets"]]
    for key, array in enumerate(arrays):
        store.init(key, array)
    times = []
    for number in range(-1, plan["rounds"]):
        mx.nd.waitall()
        store._barrier()
        started = time.perf_counter()
        for key, array in enumerate(arrays):
            store.push(key, array, priority=-key)
        for key, array in enumerate(arrays):
            store.pull(key, out=array, priority=-key)
        mx.nd.waitall()
        store._barrier()
        if number >= 0:
            times.append(time.perf_counter() - started)
    if store.rank == 0:
        print("RESULT " + json.dumps(times), flush=True)


if __name__ == "__main__":
    main()
