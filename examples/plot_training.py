"""Draw what examples/keras_mnist.py --log has written: time and accuracy per epoch, one line per rank.

python examples/plot_training.py training.csv                    makes training.png
python examples/plot_training.py three.csv alone.csv --out comparison.png
"""

import argparse
import csv
import sys
from collections import defaultdict
from pathlib import Path

try:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
except ModuleNotFoundError:
    raise SystemExit(f"Install matplotlib: {sys.executable} -m pip install matplotlib") from None


def main():
    parser = argparse.ArgumentParser(description="Draw time and accuracy per epoch.")
    parser.add_argument("logs", nargs="+", type=Path, help="files that keras_mnist.py --log has written")
    parser.add_argument("--out", type=Path, help="the picture [the first log's name with .png]")
    args = parser.parse_args()

    figure, (times, accuracies) = pyplot.subplots(1, 2, figsize=(11, 4))
    for log in args.logs:
        lines = defaultdict(list)
        with log.open(newline="") as file:
            for row in csv.DictReader(file):
                lines[int(row["rank"]), row["host"]].append(row)
        for (rank, host), rows in sorted(lines.items()):
            epochs = [int(row["epoch"]) for row in rows]
            label = f"rank {rank} on {host}" if len(args.logs) == 1 else f"{log.stem}: rank {rank} on {host}"
            times.plot(epochs, [float(row["seconds"]) for row in rows], marker=".", label=label)
            accuracies.plot(epochs, [float(row["accuracy"]) for row in rows], marker=".", label=label)
    times.set(xlabel="epoch", ylabel="seconds per epoch", ylim=(0, None))
    accuracies.set(xlabel="epoch", ylabel="validation accuracy")
    accuracies.legend()
    figure.tight_layout()
    picture = args.out or args.logs[0].with_suffix(".png")
    figure.savefig(picture, dpi=150)
    print(f"{picture} has been written")


if __name__ == "__main__":
    main()
