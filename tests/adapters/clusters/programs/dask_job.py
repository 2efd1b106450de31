"""Jobs on a real Dask cluster of four processes on this machine."""

from __future__ import annotations

import time

import functions
from distributed import Client, LocalCluster, wait
from functions import error_of, write

import ringcomm.dask


def await_successor(client: Client, lost: str) -> None:
    """Wait until Dask has noticed that a worker has gone, and has started another one."""
    while lost in workers(client) or len(workers(client)) < 4:
        time.sleep(0.1)


def killed(client: Client, chosen: list) -> dict:
    """One worker of a submitted job dies: what the futures of the others and its own become."""
    futures = ringcomm.dask.submit(client, functions.die, workers=chosen)
    wait(futures[0])
    return {"other": error_of(futures[0].result), "own": error_of(lambda: futures[1].result(timeout=60))}


def workers(client: Client) -> list:
    return list(client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.workers)))


def main() -> None:
    facts: dict = {}
    options = {"n_workers": 4, "threads_per_worker": 2, "dashboard_address": None}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        facts["first"] = ringcomm.dask.run(client, functions.describe, 1.0)
        facts["second"] = ringcomm.dask.run(client, functions.describe, 1.0)
        facts["local_rank"] = ringcomm.dask.run(client, functions.sees_local_rank, pass_local_rank=True)
        facts["environment"] = ringcomm.dask.run(client, functions.environment, "HOME")
        five = client.submit(float, 5)
        facts["arguments"] = ringcomm.dask.run(client, functions.add, five, priority=client.submit(float, 2))
        facts["failed"] = error_of(lambda: ringcomm.dask.run(client, functions.fail))
        there = sorted(workers(client))
        two = [
            ringcomm.dask.submit(client, functions.describe, factor, workers=part)
            for factor, part in ((1.0, there[:2]), (10.0, there[2:]))
        ]
        facts["two_jobs"] = [client.gather(futures) for futures in two]
        facts["torch"] = [
            error_of(lambda: ringcomm.dask.run(client, functions.train_torch, True, workers=there[:2])),
            *(ringcomm.dask.run(client, functions.train_torch, False, workers=there[:2]) for _ in range(2)),
        ]
        facts["died"] = error_of(lambda: ringcomm.dask.run(client, functions.die, workers=there[:3]))
        await_successor(client, there[1])
        there = sorted(workers(client))
        facts["submitted"] = killed(client, there[:2])
        await_successor(client, there[1])
        facts["after"] = ringcomm.dask.run(client, functions.describe, 1.0)
        here = workers(client)[0]
        facts["twice"] = error_of(lambda: ringcomm.dask.run(client, print, workers=[here, here]))
        facts["unknown"] = error_of(lambda: ringcomm.dask.run(client, print, workers=["tcp://127.0.0.1:1"]))
    options = {"n_workers": 2, "processes": False, "dashboard_address": None}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        facts["threads"] = error_of(lambda: ringcomm.dask.run(client, functions.describe, 1.0))
    write(facts)


if __name__ == "__main__":
    main()
