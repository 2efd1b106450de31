"""Teach a linear model to read handwritten digits in the tasks of a Spark job.

The lines marked with "<---" are what makes the tasks one training run. The images are part of scikit-learn.
"""

import argparse
import os
import sys


def train(steps):
    """On every rank: average the gradients of all ranks; the same weights everywhere."""
    import numpy as np
    from sklearn.datasets import load_digits

    import ringcomm as rc

    rc.init()
    images, labels = load_digits(return_X_y=True)
    images = np.hstack([images / 16, np.ones((len(images), 1))])
    mine, wanted = images[rc.rank() :: rc.size()], np.eye(10)[labels[rc.rank() :: rc.size()]]
    weights = np.zeros((65, 10))
    for _ in range(steps):
        scores = np.exp(mine @ weights)
        gradient = mine.T @ (scores / scores.sum(axis=1, keepdims=True) - wanted) / len(mine)
        weights -= 0.5 * rc.allreduce(gradient, weight=len(mine))  # <---
    return float(np.mean((images @ weights).argmax(axis=1) == labels)), weights


def main():
    parser = argparse.ArgumentParser(description="Train on handwritten digits with Spark and ringcomm.")
    parser.add_argument("-n", type=int, default=2, help="number of ranks [2]")
    parser.add_argument("--steps", type=int, default=100, help="how often to change the weights [100]")
    args = parser.parse_args()

    from pyspark.sql import SparkSession

    import ringcomm.spark

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName("digits")
    if "MASTER" not in os.environ and "SPARK_ENV_LOADED" not in os.environ:
        builder = builder.master(f"local[{args.n}]")
    session = builder.getOrCreate()
    results = ringcomm.spark.run(train, (args.steps,), num_proc=args.n)  # <---
    session.stop()
    if any((weights != results[0][1]).any() for _, weights in results):
        raise SystemExit("the weights differ between ranks")
    print(f"{len(results)} ranks, the same weights on all; accuracy {results[0][0]:.4f}")


if __name__ == "__main__":
    main()
