"""Steps of small models, where a step is not much longer than its communication.

    ringrun -np 2 benchmarks/small_steps.py [--framework torch] [--rounds 40] [--output FILE] [--quick]

Everything takes turns in the same processes, so whatever else the machine does hits all alike. Measured are
direct and named all-reduces of 10 KB, and the steps of a model of 12 tensors and 50 KB: alone, over Gloo's
DistributedDataParallel, over ringcomm's, and with DistributedOptimizer (``--framework torch``), or with
variables of the same sizes in TensorFlow, in graph functions and in TensorFlow 1 sessions (``tensorflow``,
``tensorflow1``). Without a framework there are the all-reduces only.

Rank 0 prints medians and fastest tenths, and both as a ratio to what the line is compared with: for
all-reduces the time itself, for steps the time over that of the step alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
for place in (str(ROOT), str(Path(__file__).resolve().parent)):
    if place not in sys.path:
        sys.path.insert(0, place)

import machine  # noqa: E402

import ringcomm as rc  # noqa: E402

Step = Callable[[], Any]
LAYERS, WIDTH = 6, 44
"""6 matrices and 6 vectors, 47.5 KB."""
WARM_UP = 5
_STEPS = "PyTorch, DDP over Gloo"
"""The one line that others are compared with from which the step alone is subtracted, too."""


class Line(NamedTuple):
    """A line of the table.

    Attributes:
        beside: the line that the ratio is to.
        alone: the line that is subtracted from both first: the step without communication.
    """

    step: Step
    beside: Optional[str] = None
    alone: Optional[str] = None


def all_reduces() -> Dict[str, Line]:
    """Twelve direct all-reduces of 10 KB, and the same by name."""
    arrays = [np.ones(2560, np.float32) for _ in range(12)]

    def direct() -> None:
        for array in arrays:
            rc.allreduce_(array, op=rc.Average)

    def named() -> None:
        handles = [
            rc.allreduce_async_(array, op=rc.Average, name=f"small.{number}")
            for number, array in enumerate(arrays)
        ]
        for handle in handles:
            handle.wait()

    return {
        "1 direct": Line(lambda: rc.allreduce_(arrays[0], op=rc.Average)),
        "12 direct": Line(direct),
        "1 named": Line(
            lambda: rc.allreduce_async_(arrays[0], op=rc.Average, name="small").wait(), "1 direct"
        ),
        "12 named": Line(named, "12 direct"),
    }


def torch_steps() -> Dict[str, Line]:
    """A model of PyTorch: alone, over Gloo, over ringcomm's process group, and with DistributedOptimizer."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import ringcomm.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    dist.init_process_group("ringcomm")
    data = torch.randn(32, WIDTH)

    def made(wrap: Callable[[Any], Any], distribute: bool = False) -> Step:
        torch.manual_seed(1)
        layers: List[Any] = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        model = wrap(torch.nn.Sequential(*layers))
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-4)
        if distribute:
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

        def step() -> None:
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()

        return step

    def ddp(backend: str) -> Callable[[Any], Any]:
        return lambda model: DistributedDataParallel(model, process_group=dist.new_group(backend=backend))

    return {
        "PyTorch, alone": Line(made(lambda model: model)),
        "PyTorch, DDP over Gloo": Line(made(ddp("gloo"))),
        "PyTorch, DDP over ringcomm": Line(made(ddp("ringcomm")), "PyTorch, DDP over Gloo", "PyTorch, alone"),
        "PyTorch, DistributedOptimizer": Line(
            made(lambda model: model, True), "PyTorch, DDP over Gloo", "PyTorch, alone"
        ),
    }


def tensorflow_steps() -> Dict[str, Line]:
    """A model of Keras in a ``tf.function``: alone, and with DistributedGradientTape."""
    import tensorflow as tf

    import ringcomm.tensorflow as hvd

    hvd.init()
    data = tf.random.normal((32, WIDTH))

    def made(wrap: Callable[[Any], Any]) -> Step:
        matrices = [tf.Variable(tf.random.normal((WIDTH, WIDTH)) * 0.1) for _ in range(LAYERS)]
        vectors = [tf.Variable(tf.zeros(WIDTH)) for _ in range(LAYERS)]

        @tf.function
        def step() -> Any:
            with tf.GradientTape() as tape:
                flow = data
                for matrix, vector in zip(matrices, vectors):
                    flow = flow @ matrix + vector
                loss = tf.reduce_mean(tf.square(flow))
            variables = [*matrices, *vectors]
            for variable, gradient in zip(variables, wrap(tape).gradient(loss, variables)):
                variable.assign_sub(1e-4 * gradient)
            return loss

        return step

    return {
        "TensorFlow, alone": Line(made(lambda tape: tape)),
        "TensorFlow, DistributedGradientTape": Line(
            made(hvd.DistributedGradientTape), "1 direct", "TensorFlow, alone"
        ),
    }


def tensorflow1_steps() -> Dict[str, Line]:
    """The same in sessions of TensorFlow 1: alone, and with DistributedOptimizer."""
    import tensorflow.compat.v1 as tf

    import ringcomm.tensorflow as hvd

    hvd.init()
    tf.disable_eager_execution()

    def made(wrap: Callable[[Any], Any]) -> Step:
        graph = tf.Graph()
        with graph.as_default():
            flow = tf.constant(np.random.default_rng(1).normal(size=(32, WIDTH)).astype(np.float32))
            for number in range(LAYERS):
                matrix = tf.Variable(0.1 * np.ones((WIDTH, WIDTH), np.float32), name=f"matrix{number}")
                flow = flow @ matrix + tf.Variable(np.zeros(WIDTH, np.float32), name=f"vector{number}")
            optimizer = wrap(tf.train.GradientDescentOptimizer(1e-4))
            train = optimizer.minimize(tf.reduce_mean(tf.square(flow)))
            session = tf.Session(graph=graph)
            session.run(tf.global_variables_initializer())
        return lambda: session.run(train)

    return {
        "TensorFlow 1, alone": Line(made(lambda optimizer: optimizer)),
        "TensorFlow 1, DistributedOptimizer": Line(
            made(hvd.DistributedOptimizer), "1 direct", "TensorFlow 1, alone"
        ),
    }


FRAMEWORKS: Dict[str, Callable[[], Dict[str, Line]]] = {
    "none": dict, "torch": torch_steps, "tensorflow": tensorflow_steps, "tensorflow1": tensorflow1_steps,
}  # fmt: skip


def measure(lines: Dict[str, Line], rounds: int, calls: int) -> Dict[str, List[float]]:
    """Seconds of every call, by line; in each round every line has ``calls`` calls in a row."""
    times: Dict[str, List[float]] = {name: [] for name in lines}
    for number in range(-WARM_UP, rounds):
        for name, line in lines.items():
            rc.barrier()
            for _ in range(calls):
                began = time.perf_counter()
                line.step()
                if number >= 0:
                    times[name].append(time.perf_counter() - began)
    return times


def table(lines: Dict[str, Line], times: Dict[str, List[float]]) -> List[str]:
    """The lines as text: median, fastest tenth, and both as ratios."""
    found = {}
    for name, each in times.items():
        ordered = sorted(each)
        tenth = ordered[: max(1, len(ordered) // 10)]
        found[name] = (ordered[len(ordered) // 2], sum(tenth) / len(tenth))
    rows = [f"{'':38}{'median ms':>10}{'fastest':>9}{'ratio':>8}{'fastest':>9}"]
    for name, line in lines.items():
        row = f"{name:38}{found[name][0] * 1e3:10.2f}{found[name][1] * 1e3:9.2f}"
        if line.beside is not None:
            for own, other, alone in zip(
                found[name], found[line.beside], found[line.alone] if line.alone else (0.0, 0.0)
            ):
                other -= alone if line.beside == _STEPS else 0.0
                row += f"{(own - alone) / other:8.2f} "
        rows.append(row.rstrip())
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--framework", choices=FRAMEWORKS, default="none")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--calls", type=int, default=10, help="calls in a row [10]")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write all times and the machine")
    parser.add_argument("--quick", action="store_true", help="only see that it works")
    args = parser.parse_args()
    rc.init()
    lines = {**all_reduces(), **FRAMEWORKS[args.framework]()}
    rounds = 2 if args.quick else args.rounds
    times = measure(lines, rounds, args.calls)
    if rc.rank() == 0:
        print("\n".join(table(lines, times)))
        if args.output is not None:
            content = {"machine": machine.facts(), "ranks": rc.size(), "seconds": times}
            args.output.write_text(json.dumps(content, indent=1) + "\n")
    rc.shutdown()


if __name__ == "__main__":
    main()
