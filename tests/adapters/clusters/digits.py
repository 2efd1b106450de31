"""Teach a linear model to read handwritten digits on the workers of a Ray, Dask or Spark cluster.

    python digits.py ray|dask|spark

The lines marked with "<---" are what makes the workers one training run. On Ray each worker keeps a Trainer,
which is asked for some steps at a time. The images are part of scikit-learn.
"""

import argparse
import os
import sys


class Trainer:
    """One rank: its part of the images, and the weights, which are the same on all ranks."""

    def __init__(self):
        import numpy as np
        from sklearn.datasets import load_digits

        import ringcomm as rc

        rc.init()  # <---
        images, self.labels = load_digits(return_X_y=True)
        self.images = np.hstack([images / 16, np.ones((len(images), 1))])
        self.mine = self.images[rc.rank() :: rc.size()]
        self.wanted = np.eye(10)[self.labels[rc.rank() :: rc.size()]]
        self.weights = np.zeros((65, 10))

    def train(self, steps):
        """Some steps; the accuracy after them, and the weights."""
        import numpy as np

        import ringcomm as rc

        for _ in range(steps):
            scores = np.exp(self.mine @ self.weights)
            errors = scores / scores.sum(axis=1, keepdims=True) - self.wanted
            gradient = self.mine.T @ errors / len(self.mine)
            self.weights -= 0.5 * rc.allreduce(gradient, weight=len(self.mine))  # <---
        return float(np.mean((self.images @ self.weights).argmax(axis=1) == self.labels)), self.weights


def train(steps):
    return Trainer().train(steps)


def on_ray(ranks, steps):
    import ray

    from ringcomm.ray import RayExecutor

    ray.init("local", num_cpus=ranks, include_dashboard=False, object_store_memory=80_000_000)
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=ranks)  # <---
    executor.start(executable_cls=Trainer)  # <---
    for _ in range(4):
        results = executor.execute(lambda trainer: trainer.train(steps // 4))  # <---
    executor.shutdown()
    ray.shutdown()
    return results


def on_dask(ranks, steps):
    from distributed import Client, LocalCluster

    import ringcomm.dask

    options = {"n_workers": ranks, "threads_per_worker": 1, "dashboard_address": None}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        return ringcomm.dask.run(client, train, steps)  # <---


def on_spark(ranks, steps):
    from pyspark.sql import SparkSession

    import ringcomm.spark

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    session = SparkSession.builder.appName("digits").master(f"local[{ranks}]").getOrCreate()
    results = ringcomm.spark.run(train, (steps,), num_proc=ranks)  # <---
    session.stop()
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train on handwritten digits with a cluster and ringcomm.")
    parser.add_argument("system", choices=("ray", "dask", "spark"))
    parser.add_argument("-n", type=int, default=2, help="number of ranks [2]")
    parser.add_argument("--steps", type=int, default=100, help="how often to change the weights [100]")
    args = parser.parse_args()
    results = {"ray": on_ray, "dask": on_dask, "spark": on_spark}[args.system](args.n, args.steps)
    if any((weights != results[0][1]).any() for _, weights in results):
        raise SystemExit("the weights differ between ranks")
    print(f"{len(results)} ranks, the same weights on all; accuracy {results[0][0]:.4f}")
