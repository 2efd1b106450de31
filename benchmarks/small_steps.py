"""Steps of small models, where a step is not much longer than its communication.

    ringrun -np 2 benchmarks/small_steps.py [--framework torch] [--rounds 40] [--output FILE] [--quick]
    sudo python benchmarks/small_steps.py --all [--python FILE …]

Everything takes turns in the same processes, so whatever else the machine does hits all alike. Measured are
direct and named all-reduces of 10 KB, and the steps of a model of 12 tensors and 50 KB: alone, in
DistributedDataParallel of one rank (what DDP costs without communication), over Gloo and over ringcomm, and
with DistributedOptimizer (``--framework torch``), or with variables of the same sizes in TensorFlow graph
functions (``tensorflow``), TensorFlow 1 sessions (``tensorflow1``), Keras (``keras``) and MXNet (``mxnet``).
Without one: all-reduces only.

Rank 0 prints medians and fastest tenths, and both as a ratio to what the line is compared with: for
all-reduces the time itself, for steps the time over that of the step alone. ``--all`` runs every framework
with 2 and 3 ranks of this machine, with 2 beside a busy process, and on two hosts of namespaces, with the
first of the given interpreters that has it, and writes benchmarks/results/small_steps.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
for place in (str(ROOT), str(Path(__file__).resolve().parent)):
    if place not in sys.path:
        sys.path.insert(0, place)

import machine  # noqa: E402
from cells import RESULTS, median  # noqa: E402

import ringcomm as rc  # noqa: E402

Step = Callable[[], Any]
LAYERS, WIDTH = 6, 44
"""6 matrices and 6 vectors, 47.5 KB."""
WARM_UP = 5
PLACES = ("2 ranks", "3 ranks", "2 ranks beside a busy process", "2 hosts")


class Line(NamedTuple):
    """A line of the table."""

    step: Step
    beside: Optional[str] = None  # the line that the ratio is to
    alone: Optional[str] = None  # the step without communication, which is subtracted first


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

    own = [dist.new_group([rank]) for rank in range(rc.size())][rc.rank()]
    return {
        "PyTorch, alone": Line(made(lambda model: model)),
        "PyTorch, DDP of one rank": Line(
            made(lambda model: DistributedDataParallel(model, process_group=own)), "PyTorch, DDP over Gloo",
            "PyTorch, alone",
        ),
        "PyTorch, DDP over Gloo": Line(made(ddp("gloo")), None, "PyTorch, alone"),
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
            made(hvd.DistributedGradientTape), "12 direct", "TensorFlow, alone"
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
            made(hvd.DistributedOptimizer), "12 direct", "TensorFlow 1, alone"
        ),
    }


def keras_steps() -> Dict[str, Line]:
    """A model of Keras on TensorFlow, by ``train_on_batch``: alone, and with DistributedOptimizer."""
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    import keras

    import ringcomm.keras as hvd

    hvd.init()
    data = np.random.default_rng(1).normal(size=(32, WIDTH)).astype(np.float32)

    def made(wrap: Callable[[Any], Any]) -> Step:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Dense(WIDTH) for _ in range(LAYERS)])
        model.compile(optimizer=wrap(keras.optimizers.SGD(1e-4)), loss="mse")
        return lambda: model.train_on_batch(data, data)

    return {
        "Keras, alone": Line(made(lambda optimizer: optimizer)),
        "Keras, DistributedOptimizer": Line(made(hvd.DistributedOptimizer), "12 direct", "Keras, alone"),
    }


def mxnet_steps() -> Dict[str, Line]:
    """A model of gluon: alone, and with DistributedTrainer."""
    import mxnet as mx

    import ringcomm.mxnet as hvd

    hvd.init()
    data = mx.nd.random.normal(shape=(32, WIDTH))

    def made(make: Callable[..., Any]) -> Step:
        network = mx.gluon.nn.Sequential()
        network.add(*[mx.gluon.nn.Dense(WIDTH) for _ in range(LAYERS)])
        network.initialize()
        network(data)
        trainer = make(network.collect_params(), "sgd", {"learning_rate": 1e-4})

        def step() -> None:
            with mx.autograd.record():
                loss = network(data).square().mean()
            loss.backward()
            trainer.step(1)
            mx.nd.waitall()

        return step

    def local(parameters: Any, *options: Any) -> Any:
        return mx.gluon.Trainer(parameters, *options, kvstore=None)

    return {
        "MXNet, alone": Line(made(local)),
        "MXNet, DistributedTrainer": Line(made(hvd.DistributedTrainer), "12 direct", "MXNet, alone"),
    }


FRAMEWORKS: Dict[str, Callable[[], Dict[str, Line]]] = {
    "none": dict, "torch": torch_steps, "tensorflow": tensorflow_steps, "tensorflow1": tensorflow1_steps,
    "keras": keras_steps, "mxnet": mxnet_steps,
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


def summary(lines: Dict[str, Line], times: Dict[str, List[float]]) -> Dict[str, Dict[str, float]]:
    """By line: the median and the mean of the fastest tenth, in seconds, and both as ratios."""
    found: Dict[str, Dict[str, float]] = {}
    for name, each in times.items():
        tenth = sorted(each)[: max(1, len(each) // 10)]
        found[name] = {"median_s": median(each), "fastest_s": sum(tenth) / len(tenth)}

    def over(name: str, kind: str) -> float:
        alone = lines[name].alone
        return found[name][kind] - (found[alone][kind] if alone else 0.0)

    for name, line in lines.items():
        if line.beside is not None:
            for kind, ratio in (("median_s", "ratio"), ("fastest_s", "fastest_ratio")):
                found[name][ratio] = over(name, kind) / over(line.beside, kind)
    return found


def run_all(pythons: List[str], rounds: int, output: Path) -> None:
    """Every framework in every place; each run replaces its own in the file."""
    results = json.loads(output.read_text()) if output.exists() else {}
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}", "TF_CPP_MIN_LOG_LEVEL": "3"}
    modules = {"none": "numpy", "tensorflow1": "tensorflow"}
    for framework in FRAMEWORKS:
        test = f"import {modules.get(framework, framework)}"
        with_it = [each for each in pythons if not subprocess.run([each, "-c", test], stderr=-1).returncode]
        for place in PLACES if with_it else ():
            with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
                options, found = ["-np", place[0]], Path(folder) / "found.json"
                if place == "2 hosts":
                    from tests.hosts.netlab import Lab

                    lab = stack.enter_context(Lab("node1", "node2", no_wlan=True, docker=False))
                    options += ["-H", "node1,node2", "-x", "PYTHONPATH"]
                    environ.update(PATH=lab.environ()["PATH"], GLOO_SOCKET_IFNAME=lab.iface("node1"))
                if "busy" in place:
                    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
                    stack.callback(busy.wait)
                    stack.callback(busy.kill)
                command = [with_it[0], "-m", "ringrun", "--threads", "1", *options, with_it[0], __file__]
                command += ["--framework", framework, "--rounds", str(rounds), "--output", str(found)]
                print(f"{framework}, {place}", flush=True)
                if not subprocess.run(command, env=environ).returncode:
                    results.setdefault(framework, {})[place] = json.loads(found.read_text())
                    output.write_text(json.dumps(results, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--framework", choices=FRAMEWORKS, default="none")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--calls", type=int, default=10, help="calls in a row [10]")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write times and the machine")
    parser.add_argument("--quick", action="store_true", help="only see that it works")
    parser.add_argument("--all", action="store_true", help="every framework in every place")
    parser.add_argument("--python", nargs="+", default=[sys.executable], metavar="FILE", help="with --all")
    args = parser.parse_args()
    rounds = 2 if args.quick else args.rounds
    if args.all:
        run_all(args.python, rounds, args.output or RESULTS / "small_steps.json")
        return
    rc.init()
    lines = {**all_reduces(), **FRAMEWORKS[args.framework]()}
    found = summary(lines, measure(lines, rounds, args.calls))
    if rc.rank() == 0:
        for name, line in found.items():
            ratios = f"  ratio {line['ratio']:.2f} {line['fastest_ratio']:.2f}" if "ratio" in line else ""
            print(f"{name:38}{line['median_s'] * 1e3:8.2f} ms, fastest {line['fastest_s'] * 1e3:.2f}{ratios}")
        if args.output is not None:
            content = {"machine": machine.facts(), "ranks": rc.size(), "lines": found}
            args.output.write_text(json.dumps(content, indent=1) + "\n")
    rc.shutdown()


if __name__ == "__main__":
    main()
