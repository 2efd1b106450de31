"""Teach a linear model to read handwritten digits on the workers of a Ray cluster.

The lines marked with "<---" are what makes the workers one training run. Each worker keeps a Trainer, which
is asked for some steps at a time. The images are part of scikit-learn.
"""

import argparse


class Trainer:
    """One rank: its part of the images, and the weights, which are the same on all ranks."""

    def __init__(self, rate):
        import numpy as np
        from sklearn.datasets import load_digits

        import ringcomm as rc

        rc.init()  # <---
        images, labels = load_digits(return_X_y=True)
        self.images = np.hstack([images / 16, np.ones((len(images), 1))])
        self.labels, self.rate = labels, rate
        self.mine = self.images[rc.rank() :: rc.size()]
        self.wanted = np.eye(10)[labels[rc.rank() :: rc.size()]]
        self.weights = np.zeros((65, 10))

    def train(self, steps):
        """Some steps; the accuracy after them, and the weights."""
        import numpy as np

        import ringcomm as rc

        for _ in range(steps):
            scores = np.exp(self.mine @ self.weights)
            errors = scores / scores.sum(axis=1, keepdims=True) - self.wanted
            gradient = self.mine.T @ errors / len(self.mine)
            self.weights -= self.rate * rc.allreduce(gradient, weight=len(self.mine))  # <---
        return float(np.mean((self.images @ self.weights).argmax(axis=1) == self.labels)), self.weights


def main():
    parser = argparse.ArgumentParser(description="Train on handwritten digits with Ray and ringcomm.")
    parser.add_argument("--cluster", action="store_true", help="use the cluster that this runs on")
    parser.add_argument("-n", type=int, default=2, help="number of ranks [2]")
    parser.add_argument("--rounds", type=int, default=4, help="how often to ask for 25 steps [4]")
    args = parser.parse_args()

    import ray

    from ringcomm.ray import RayExecutor

    if args.cluster:
        ray.init()
    else:
        ray.init("local", num_cpus=args.n, include_dashboard=False, object_store_memory=80_000_000)
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=args.n)  # <---
    executor.start(executable_cls=Trainer, executable_kwargs={"rate": 0.5})  # <---
    for done in range(1, args.rounds + 1):
        results = executor.execute(lambda trainer: trainer.train(25))  # <---
        print(f"after {25 * done} steps: accuracy {results[0][0]:.4f}")
    executor.shutdown()
    ray.shutdown()
    if any((weights != results[0][1]).any() for _, weights in results):
        raise SystemExit("the weights differ between ranks")
    print(f"{len(results)} ranks, the same weights on all; accuracy {results[0][0]:.4f}")


if __name__ == "__main__":
    main()
