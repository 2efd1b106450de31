"""The example for MXNet, the program on its page, and the script of an article, run by ringrun."""

from __future__ import annotations

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import ROOT, run_python

if find_spec("mxnet") is None:
    pytest.skip("MXNet is not installed", allow_module_level=True)

ARTICLE = """
import mxnet as mx
import horovod.mxnet as hvd

# Horovod: initialize Horovod
hvd.init()

# Horovod: pin a GPU to be used to local rank
context = mx.cpu(hvd.local_rank())

# Build model
model = mx.gluon.nn.HybridSequential()
model.add(mx.gluon.nn.Dense(16, activation="relu"), mx.gluon.nn.Dense(10))

# Initialize parameters
initializer = mx.init.Xavier(rnd_type="gaussian", factor_type="in", magnitude=2)
model.initialize(initializer, ctx=context)
params = model.collect_params()

# Horovod: broadcast parameters
hvd.broadcast_parameters(params, root_rank=0)

# Create optimizer
optimizer_params = {"learning_rate": 0.1, "momentum": 0.9}
opt = mx.optimizer.create('sgd', **optimizer_params)

# Horovod: wrap optimizer with DistributedOptimizer
opt = hvd.DistributedOptimizer(opt)

# Create trainer and loss function
trainer = mx.gluon.Trainer(params, opt, kvstore=None)
loss_fn = mx.gluon.loss.SoftmaxCrossEntropyLoss()

# Train model
from sklearn.datasets import load_digits
images, labels = load_digits(return_X_y=True)
metric = mx.metric.Accuracy()
for epoch in range(2):
    metric.reset()
    for start in range(64 * hvd.rank(), 1792, 64 * hvd.size()):
        data = mx.nd.array(images[start : start + 64] / 16, ctx=context)
        label = mx.nd.array(labels[start : start + 64], ctx=context)
        with mx.autograd.record():
            output = model(data)
            loss = loss_fn(output, label)
        loss.backward()
        trainer.step(64)
        metric.update([label], [output])
print("Epoch[1] accuracy=%f" % metric.get()[1])
"""
"""The article "Distributed Learning with Apache MXNet and Horovod" has the lines to the trainer; the model,
the data and the loop, which it leaves out, are ours, and the context is a CPU's."""


def ringrun(*words: Any, **environment: str) -> str:
    """Run a job; what it printed."""
    return run_python("-m", "ringrun", *words, **environment)


@pytest.mark.parametrize("options", [(), ("--module",)])
def test_the_example(options: Any) -> None:
    output = ringrun("-np", 2, ROOT / "examples" / "mxnet_digits.py", "--epochs", 4, *options)
    (accuracy,) = re.findall(r"final validation accuracy ([\d.]+)", output)
    assert float(accuracy) > 0.9


def test_the_program_in_the_documentation(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "mxnet.md").read_text()
    (script,) = re.findall(r"```python\n(# mxnet_train.py\n.*?)```", page, re.DOTALL)
    (tmp_path / "mxnet_train.py").write_text(script)
    output = ringrun("-np", 2, tmp_path / "mxnet_train.py")
    assert float(output.split()[-1]) < 1e-2, output


def test_the_script_of_the_article(tmp_path: Path) -> None:
    """Its command line too, with the program's name changed: ``mpirun -np 2 -H localhost:2 ...``."""
    (tmp_path / "mxnet_mnist.py").write_text(ARTICLE)
    folder = Path(sys.executable).parent
    output = ringrun(
        "--horovod", "-np", 2, "-H", "localhost:2", "-bind-to", "none", "-map-by", "slot", "python",
        tmp_path / "mxnet_mnist.py", PATH=f"{folder}:{os.environ['PATH']}",
    )  # fmt: skip
    accuracies = [float(found) for found in re.findall(r"accuracy=([\d.]+)", output)]
    assert len(accuracies) == 2 and min(accuracies) > 0.5, output
