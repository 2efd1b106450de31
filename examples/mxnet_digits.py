"""Teach a small neural network to read handwritten digits, with MXNet, on any number of processes.

    python examples/mxnet_digits.py                                          one process
    ringrun -np 2 examples/mxnet_digits.py                                   two on this machine
    ringrun -np 3 -H localhost,jetson1,jetson2 examples/mxnet_digits.py      three machines

Every process runs this program. The lines marked with "<---" make them one training run. With --module the
network is a symbol that a Module trains, otherwise it is a block of gluon. The images are part of
scikit-learn; nothing is downloaded.
"""

import argparse
import sys
import time

try:
    import mxnet as mx
    import numpy as np
    from sklearn.datasets import load_digits

    import ringcomm.mxnet as hvd
except ModuleNotFoundError as missing:
    package = {"sklearn": "scikit-learn"}.get(missing.name, missing.name)
    raise SystemExit(
        f"This example needs {package}, which is missing here. "
        f"Install it: {sys.executable} -m pip install {package}"
    ) from None

VALIDATION = 360  # images that are kept back


def load():
    """Images of 64 numbers from 0 to 1 and labels: for training, then for validation."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(1).permutation(len(images))  # the same on every process
    images, labels = (images[order] / 16).astype(np.float32), labels[order].astype(np.float32)
    return (images[VALIDATION:], labels[VALIDATION:]), (images[:VALIDATION], labels[:VALIDATION])


def batches(images, labels, size, epoch):
    """This process's part of every batch of an epoch; all processes have equally many images in each."""
    order = np.random.default_rng(epoch).permutation(len(images))
    each = size // hvd.size()
    for start in range(0, len(order) - size + 1, size):
        mine = order[start + hvd.rank() * each : start + (hvd.rank() + 1) * each]  # <--- its part
        yield mx.nd.array(images[mine]), mx.nd.array(labels[mine])


def train_block(args, training):
    """Train a block of gluon; returns what classifies images."""
    model = mx.gluon.nn.HybridSequential()
    model.add(mx.gluon.nn.Dense(64, activation="relu"), mx.gluon.nn.Dense(10))
    model.initialize(mx.init.Xavier())
    model.hybridize()
    params = model.collect_params()
    hvd.broadcast_parameters(params, root_rank=0)  # <--- all start from the same weights
    # <--- gradients are averaged over all processes before each step
    trainer = hvd.DistributedTrainer(params, "sgd", {"learning_rate": args.lr, "momentum": 0.9})
    loss_of = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    for epoch in range(1, args.epochs + 1):
        started, losses = time.perf_counter(), []
        for images, labels in batches(*training, args.batch_size, epoch):
            with mx.autograd.record():
                loss = loss_of(model(images), labels)
            loss.backward()
            trainer.step(len(images))
            losses.append(loss.mean())
        report(epoch, sum(losses) / len(losses), started)
    return model


def train_module(args, training):
    """Train a symbol by a Module; returns what classifies images."""
    each = args.batch_size // hvd.size()
    hidden = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=64, name="first")
    scores = mx.sym.FullyConnected(mx.sym.Activation(hidden, act_type="relu"), num_hidden=10, name="second")
    module = mx.mod.Module(mx.sym.SoftmaxOutput(scores, name="softmax"))
    module.bind([("data", (each, 64))], [("softmax_label", (each,))])
    module.init_params(mx.init.Xavier())
    weights, others = module.get_params()
    hvd.broadcast_parameters(weights, root_rank=0)  # <--- all start from the same weights
    module.set_params(weights, others)
    optimizer = mx.optimizer.create("sgd", learning_rate=args.lr, momentum=0.9, rescale_grad=1.0 / each)
    # <--- gradients are averaged over all processes before each step
    module.init_optimizer(kvstore=None, optimizer=hvd.DistributedOptimizer(optimizer))
    metric = mx.metric.CrossEntropy()
    for epoch in range(1, args.epochs + 1):
        started = time.perf_counter()
        metric.reset()
        for images, labels in batches(*training, args.batch_size, epoch):
            module.forward_backward(mx.io.DataBatch([images], [labels]))
            module.update_metric(metric, [labels])
            module.update()
        report(epoch, mx.nd.array([metric.get()[1]]), started)

    def classify(images):
        module.reshape([("data", images.shape)], [("softmax_label", images.shape[:1])])
        module.forward(mx.io.DataBatch([images]), is_train=False)
        return module.get_outputs()[0]

    return classify


def report(epoch, loss, started):
    """Show the average loss of all processes."""
    mean = hvd.allreduce(loss, name="loss").asscalar()  # <--- only to show it
    if hvd.rank() == 0:
        print(f"epoch {epoch:2d}  loss {mean:.6f}  {time.perf_counter() - started:.2f} s", flush=True)


def main():
    parser = argparse.ArgumentParser(description="Train on handwritten digits with MXNet and ringcomm.")
    add = parser.add_argument
    add("--epochs", type=int, default=10, help="how often to go through all images [10]")
    add("--batch-size", type=int, default=48, help="images per step, all processes together [48]")
    add("--lr", type=float, default=0.1, help="learning rate [0.1]")
    add("--module", action="store_true", help="train a symbol by a Module, not a block of gluon")
    args = parser.parse_args()

    hvd.init()  # <--- find the other processes
    if args.batch_size < hvd.size():
        raise SystemExit(f"--batch-size must be at least the number of processes, {hvd.size()}.")
    args.batch_size -= args.batch_size % hvd.size()
    training, (images, labels) = load()
    classify = (train_module if args.module else train_block)(args, training)
    # All have the same weights, so each checks its share of the validation images.
    mine = slice(hvd.rank(), None, hvd.size())
    right = (classify(mx.nd.array(images[mine])).argmax(1).asnumpy() == labels[mine]).sum()
    total = hvd.allreduce(mx.nd.array([right]), op=hvd.Sum, name="right").asscalar()
    if hvd.rank() == 0:
        print(f"{hvd.size()} process(es); final validation accuracy {total / len(labels):.4f}")


if __name__ == "__main__":
    main()
