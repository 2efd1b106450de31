"""What every rank checks about training: it is what one process with the data of all ranks would do."""

from __future__ import annotations

import pickle
import tempfile
import warnings
from pathlib import Path
from typing import Any, Callable, Dict, List

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

import ringcomm.mxnet as hvd
from ringcomm.errors import ConfigError, ShapeError
from tests.adapters import digits
from tests.adapters.jobs import same_everywhere
from tests.adapters.mxnet.checks_collectives import context
from tests.support.errors import raises

BATCH = digits.GLOBAL_BATCH
SGD = {"learning_rate": digits.LEARNING_RATE, "momentum": digits.MOMENTUM}


def network(known: bool = False) -> Any:
    """The common network in gluon; deferred unless the layers' inputs are known."""
    block = gluon.nn.HybridSequential(prefix="digits_")
    with block.name_scope():
        block.add(gluon.nn.Dense(digits.HIDDEN, activation="relu", in_units=64 if known else 0))
        block.add(gluon.nn.Dense(10, in_units=digits.HIDDEN if known else 0))
    for place, (matrix, bias) in enumerate(zip(*[iter(digits.weights(hvd.rank()))] * 2)):
        block[place].weight.init = mx.init.Constant(mx.nd.array(matrix.T))
        block[place].bias.init = mx.init.Constant(mx.nd.array(bias))
    block.initialize(ctx=context())
    block.hybridize()
    return block


Make = Callable[[Any], Any]


def trained(make: Make, known: bool = False) -> None:
    """Compare the loss curve of the gluon script of Horovod's articles."""
    block = network(known)
    params = block.collect_params()
    hvd.broadcast_parameters(params, root_rank=0)
    trainer = make(params)
    digits.check_curve(hvd, lambda images, labels: step_of(block, trainer, images, labels))
    same_everywhere(np.concatenate([params[name].data().asnumpy().ravel() for name in sorted(params.keys())]))


def step_of(block: Any, trainer: Any, images: Any, labels: Any) -> float:
    with autograd.record():
        scores = block(mx.nd.array(images, ctx=context()))
        loss = gluon.loss.SoftmaxCrossEntropyLoss()(scores, mx.nd.array(labels, ctx=context()))
    loss.backward()
    trainer.step(len(images))
    return float(loss.mean().asscalar())


def distributed(**options: Any) -> Make:
    return lambda params: hvd.DistributedTrainer(params, "sgd", dict(SGD), **options)


def check_gluon_has_the_loss_curve_of_one_process() -> None:
    trained(distributed())
    trained(distributed(prefix="known."), known=True)


def check_a_wrapped_optimizer_is_unwrapped() -> None:
    def make(params: Any) -> Any:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = hvd.DistributedTrainer(params, hvd.DistributedOptimizer(mx.optimizer.SGD(**SGD)))
        assert ["unwrapped" in str(item.message) for item in caught] == [True]
        return trainer

    trained(make)


def check_ways_to_reduce() -> None:
    for options in ({"num_groups": 1}, {"num_groups": 3}, {"gradient_predivide_factor": 2.0}):
        trained(distributed(**options))
    trained(distributed(compression=_Twice))
    for compression, most in ((hvd.Compression.fp16, 2e-3), ("bf16", 2e-2), (hvd.Compression.int8, 5e-2)):
        parameter = gluon.Parameter("weight", shape=(70, 80))
        parameter.initialize(mx.init.Zero(), ctx=context())
        trainer = hvd.DistributedTrainer(
            {"weight": parameter}, "sgd", {"learning_rate": 1.0}, compression=compression
        )
        own = [np.random.default_rng(rank).uniform(-1, 1, (70, 80)) for rank in range(hvd.size())]
        with autograd.record():
            loss = (parameter.data() * mx.nd.array(own[hvd.rank()], ctx=context())).sum()
        loss.backward()
        trainer.step(1)
        error = np.abs(parameter.data().asnumpy() + np.mean(own, axis=0)).max()
        assert error < most and (hvd.size() == 1 or error > 1e-6), (compression, error)
        same_everywhere(parameter.data().asnumpy())
    raises(ValueError, lambda: trained(distributed(num_groups=-1)), "groups")
    raises(ValueError, lambda: trained(distributed(prefix=1)), "prefix")


class _Twice:
    """A compression of the program's own, which returns new arrays."""

    @staticmethod
    def compress(tensor: Any) -> Any:
        return tensor * 2, "twice"

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        assert context == "twice"
        return tensor / 2


def module() -> Any:
    """The common network as a symbol."""
    data = mx.sym.Variable("data")
    hidden = mx.sym.FullyConnected(data, num_hidden=digits.HIDDEN, name="first")
    active = mx.sym.Activation(hidden, act_type="relu")
    scores = mx.sym.FullyConnected(active, num_hidden=10, name="second")
    return mx.sym.SoftmaxOutput(scores, mx.sym.Variable("softmax_label"), name="softmax")


def check_module_has_the_loss_curve_of_one_process() -> None:
    for options in ({}, {"num_groups": 2}, {"gradient_predivide_factor": 2.0}):
        each = BATCH // hvd.size()
        optimizer = mx.optimizer.create("sgd", rescale_grad=1.0 / each, **SGD)
        fitted = mx.mod.Module(module(), context=context())
        fitted.bind(data_shapes=[("data", (each, 64))], label_shapes=[("softmax_label", (each,))])
        fitted.init_params(mx.init.Zero())
        names = ["first_weight", "first_bias", "second_weight", "second_bias"]
        own = {name: mx.nd.array(array.T) for name, array in zip(names, digits.weights(hvd.rank()))}
        hvd.broadcast_parameters(own, root_rank=0)
        fitted.set_params(own, {})
        fitted.init_optimizer(kvstore=None, optimizer=hvd.DistributedOptimizer(optimizer, **options))

        def step(images: Any, labels: Any, fitted: Any = fitted) -> float:
            fitted.forward_backward(mx.io.DataBatch([mx.nd.array(images)], [mx.nd.array(labels)]))
            chances = fitted.get_outputs()[0].asnumpy()
            fitted.update()
            return float(-np.log(chances[np.arange(len(labels)), labels]).mean())

        digits.check_curve(hvd, step)
        arrays, _ = fitted.get_params()
        same_everywhere(np.concatenate([arrays[name].asnumpy().ravel() for name in names]))


def check_a_process_set() -> None:
    """Members train together; the other ranks, for themselves."""
    if hvd.size() < 3:
        return
    members = hvd.add_process_set([0, 1])
    wrapped = hvd.DistributedOptimizer(mx.optimizer.SGD(learning_rate=1.0), process_set=members)
    for make in (
        lambda params: hvd.DistributedTrainer(params, "sgd", {"learning_rate": 1.0}, process_set=members),
        lambda params: gluon.Trainer(params, wrapped, kvstore=None),
    ):
        parameter = gluon.Parameter("weight", shape=(2,))
        parameter.initialize(mx.init.Zero(), ctx=context())
        trainer = make({"weight": parameter})
        with autograd.record():
            loss = (parameter.data() * (hvd.rank() + 1)).sum()
        loss.backward()
        trainer.step(1)
        expected = 1.5 if hvd.rank() < 2 else hvd.rank() + 1
        assert parameter.data().asnumpy().tolist() == [-expected] * 2
    hvd.remove_process_set(members)


def check_layers_that_only_some_ranks_use() -> None:
    """Ranks without a new gradient contribute zeros, and all make the same step."""
    names = ["first", "second", "last"]
    params = {name: gluon.Parameter(name, shape=(2,)) for name in names}
    for parameter in params.values():
        parameter.initialize(mx.init.Zero(), ctx=context())
    trainer = hvd.DistributedTrainer(params, "sgd", {"learning_rate": 1.0})
    expected = dict.fromkeys(names, 0.0)
    for step in range(3):
        used = names[(hvd.rank() + step) % 2]  # never the last one
        with autograd.record():
            loss = (params[used].data() * (hvd.rank() + 1)).sum()
        loss.backward()
        trainer.step(1, ignore_stale_grad=True)
        for rank in range(hvd.size()):
            expected[names[(rank + step) % 2]] -= (rank + 1) / hvd.size()
        for name in names:
            np.testing.assert_allclose(params[name].data().asnumpy(), expected[name], rtol=1e-5)


def check_gradients_can_be_clipped_between() -> None:
    parameter = gluon.Parameter("weight", shape=(2,))
    parameter.initialize(mx.init.Zero(), ctx=context())
    trainer = hvd.DistributedTrainer({"weight": parameter}, "sgd", {"learning_rate": 1.0})
    with autograd.record():
        loss = (parameter.data() * (hvd.rank() + 1)).sum()
    loss.backward()
    trainer.allreduce_grads()
    assert parameter.grad().asnumpy().tolist() == [(hvd.size() + 1) / 2] * 2
    gluon.utils.clip_global_norm([parameter.grad()], 0.5)
    trainer.update(1)
    np.testing.assert_allclose(np.linalg.norm(parameter.data().asnumpy()), 0.5, rtol=1e-3)


def check_optimizers_keep_their_interface() -> None:
    inner = mx.optimizer.create("sgd", **SGD)
    outer = hvd.DistributedOptimizer(inner, num_groups=1)
    outer.rescale_grad = 0.25
    outer.set_learning_rate(0.5)
    assert (inner.rescale_grad, inner.lr, outer.learning_rate, outer.momentum) == (0.25, 0.5, 0.5, 0.9)
    outer.set_lr_mult({"a": 2.0})
    outer.set_wd_mult({"a": 3.0})
    assert inner.lr_mult["a"] == 2.0 and inner.wd_mult["a"] == 3.0
    raises(AttributeError, lambda: outer.no_such_thing)
    raises(ValueError, lambda: hvd.DistributedOptimizer(outer), "takes an optimizer")
    raises(ValueError, lambda: hvd.DistributedOptimizer("sgd"), "takes an optimizer")
    half = mx.nd.zeros((2,), dtype="float16")
    precise = hvd.DistributedOptimizer(mx.optimizer.SGD(learning_rate=1.0, multi_precision=True))
    state = precise.create_state_multi_precision(0, half)
    precise.update_multi_precision([0], [half], [mx.nd.ones((2,), dtype="float16")], [state])
    assert half.asnumpy().tolist() == [-1, -1]


def check_optimizers_are_pickled_with_their_process_set() -> None:
    members = hvd.add_process_set([0]) if hvd.size() > 1 else hvd.global_process_set
    optimizer = hvd.DistributedOptimizer(
        mx.optimizer.SGD(learning_rate=0.5), gradient_predivide_factor=2.0, process_set=members
    )
    loaded = pickle.loads(pickle.dumps(optimizer))
    factor, _, found = loaded._options
    assert (loaded.learning_rate, factor, found.ranks) == (0.5, 2.0, members.ranks)
    assert found.process_set_id == members.process_set_id
    weight = mx.nd.zeros((2,))
    loaded.update(0, weight, mx.nd.ones((2,)) * (hvd.rank() + 1), loaded.create_state(0, weight))
    assert weight.asnumpy().tolist() == [-0.5 * (hvd.rank() + 1)] * 2
    raises(AttributeError, lambda: type(optimizer).__new__(type(optimizer)).lr, "_optimizer")
    if hvd.size() > 1:
        hvd.remove_process_set(members)


def check_states_are_saved_and_loaded() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for make in (
            distributed(),
            lambda params: gluon.Trainer(
                params, hvd.DistributedOptimizer(mx.optimizer.SGD(**SGD)), kvstore=None
            ),
        ):
            block = network(known=True)
            params = block.collect_params()
            hvd.broadcast_parameters(params)
            trainer = make(params)
            path = str(Path(folder, "states"))
            losses = []
            for step in range(6):
                if step == 3:
                    trainer.save_states(path)
                    trainer = make(params)
                    trainer.load_states(path)
                    assert trainer.learning_rate == digits.LEARNING_RATE
                losses.append(step_of(block, trainer, *digits.samples(step, hvd.rank(), hvd.size())))
            means = np.mean(hvd.allgather_object(losses), axis=0)
            np.testing.assert_allclose(means, digits.loss_curve()[:6], rtol=2e-4)


def check_what_cannot_be_trained() -> None:
    several = gluon.Parameter("weight", shape=(2,))
    several.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    raises(ValueError, lambda: hvd.DistributedTrainer({"weight": several}, "sgd"), "one context")
    if hvd.size() == 1:
        return
    embedding = gluon.nn.Embedding(4, 2, sparse_grad=True)
    embedding.initialize(ctx=context())
    trainer = hvd.DistributedTrainer(embedding.collect_params(), "sgd")
    with autograd.record():
        loss = embedding(mx.nd.array([1, 2], ctx=context())).sum()
    loss.backward()
    raises(ValueError, lambda: trainer.step(1), "sparse_grad=False")


# ---- broadcast_parameters: deferred initialization, and models that differ -------------------------

COUNT = 6
"""Number of layers of a model."""


def layers(known: bool = False, prefix: str = "net_") -> Any:
    """Dense layers side by side, each of which can be used alone; other first weights on every rank."""
    mx.random.seed(hvd.rank() + 1)
    block = gluon.nn.Sequential(prefix=prefix)
    with block.name_scope():
        for _ in range(COUNT):
            block.add(gluon.nn.Dense(4, in_units=3 if known else 0))
    block.initialize(mx.init.Normal(1.0), ctx=context())
    return block


def use(block: Any, order: List[int]) -> Any:
    """Run layers in some order; all parameters, flat."""
    inputs = mx.nd.ones((2, 3), ctx=context())
    for place in order:
        block[place](inputs).wait_to_read()
    return values(block)


def values(block: Any) -> Any:
    params = block.collect_params()
    return np.concatenate([params[name].data().asnumpy().ravel() for name in sorted(params.keys())])


def check_a_dict_of_arrays() -> None:
    own: Dict[str, Any] = {
        "b": mx.nd.ones((2, 3), ctx=context()) * hvd.rank(),
        "a": mx.nd.ones((4,), dtype="int64", ctx=context()) * (hvd.rank() + 5),
    }
    last = hvd.size() - 1
    hvd.broadcast_parameters(own, root_rank=last)
    assert (own["b"].asnumpy() == last).all() and (own["a"].asnumpy() == last + 5).all()
    hvd.broadcast_parameters({})


def check_two_contexts_per_rank() -> None:
    parameter = gluon.Parameter("weight", shape=(3,))
    parameter.initialize(mx.init.Constant(hvd.rank() + 1), ctx=[mx.cpu(0), mx.cpu(1)])
    hvd.broadcast_parameters({"weight": parameter}, 0)
    assert [array.asnumpy().tolist() for array in parameter.list_data()] == [[1, 1, 1]] * 2


def check_deferred_layers_in_another_order_on_every_rank() -> None:
    """Nothing is waited for but the root, whose forward pass also comes to every layer."""
    for seed in range(4):
        block = layers()
        hvd.broadcast_parameters(block.collect_params(), root_rank=seed % hvd.size())
        order = [int(place) for place in np.random.default_rng([seed, hvd.rank()]).permutation(COUNT)]
        same_everywhere(use(block, order))


def check_ranks_of_which_some_have_their_parameters() -> None:
    """As when only one rank loads a checkpoint."""
    for known in (hvd.rank() == 0, hvd.rank() != 0, hvd.rank() == hvd.size() - 1):
        block = layers(known)
        hvd.broadcast_parameters(block.collect_params(), 0)
        same_everywhere(use(block, list(range(COUNT))))


def check_parameters_are_sent_once() -> None:
    """Twice broadcast before they are there; and later initialized anew by this rank alone."""
    block = layers()
    for prefix in (None, None, "again."):
        hvd.broadcast_parameters(block.collect_params(), 0, prefix)
    same_everywhere(use(block, list(range(COUNT))))
    if hvd.rank() == 0:
        block.initialize(mx.init.Constant(9), ctx=context(), force_reinit=True)
        assert set(values(block)) <= {0.0, 9.0}
    hvd.broadcast_parameters(block.collect_params(), 0)
    assert set(values(block)) <= {0.0, 9.0}


def check_parameters_of_a_process_set() -> None:
    if hvd.size() < 3:
        return
    members = hvd.add_process_set([1, 2])
    block = layers()
    if members.included():
        hvd.broadcast_parameters(block.collect_params(), root_rank=2, process_set=members)
        found = hvd.allgather_object(use(block, [members.rank(), 5, 4, 3, 2, 1, 0]), process_set=members)
        assert (found[0] == found[1]).all()
    hvd.remove_process_set(members)


def check_models_that_differ() -> None:
    raises(ValueError, lambda: hvd.broadcast_parameters([mx.nd.ones((1,))], 0), "invalid params of type")
    raises(ValueError, lambda: hvd.broadcast_parameters({}, 0, prefix=3))
    if hvd.size() == 1:
        return
    odd = hvd.rank() == 1
    named = layers(prefix="other_" if odd else "net_").collect_params()
    raises(ConfigError, lambda: hvd.broadcast_parameters(named, 0), "All ranks need the same model")
    one = {"x": mx.nd.ones((2,), dtype="float64" if odd else "float32")}
    raises(ConfigError, lambda: hvd.broadcast_parameters(one, 0), "float64 on rank 1")
    one = {"x": mx.nd.ones((2 + odd,))}
    raises(RuntimeError, lambda: hvd.broadcast_parameters(one, 0))
    parameter = gluon.Parameter("weight", shape=(2,))
    if not odd:
        parameter.initialize()
    raises(ConfigError, lambda: hvd.broadcast_parameters({"weight": parameter}, 0), "rank 1: ")
    # Of which size it is shows when the layer is used; the other ranks have what they need.
    block = gluon.nn.Dense(4, prefix="dense_")
    block.initialize(ctx=context())
    hvd.broadcast_parameters(block.collect_params(), 0)
    inputs = mx.nd.ones((2, 5 if odd else 3), ctx=context())
    if odd:
        raises(ShapeError, lambda: block(inputs), "20 elements here, and 12 on rank 0")
    else:
        block(inputs).wait_to_read()
