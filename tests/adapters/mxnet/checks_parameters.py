"""What every rank checks about broadcast_parameters: deferred initialization, and models that differ."""

from __future__ import annotations

from typing import Any, Dict, List

import mxnet as mx
import numpy as np
from mxnet import gluon

import ringcomm as rc
import ringcomm.mxnet as hvd
from ringcomm.errors import ConfigError, ShapeError
from tests.adapters.jobs import same_everywhere
from tests.adapters.mxnet.checks_collectives import context
from tests.support.errors import raises

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


def roots(block: Any) -> Any:
    """The root's values, to which every rank must come."""
    return hvd.broadcast_object(values(block), 0)


def check_a_dict_of_arrays() -> None:
    own: Dict[str, Any] = {
        "b": mx.nd.ones((2, 3), ctx=context()) * hvd.rank(),
        "a": mx.nd.ones((4,), dtype="int64", ctx=context()) * (hvd.rank() + 5),
    }
    last = hvd.size() - 1
    hvd.broadcast_parameters(own, root_rank=last)
    assert (own["b"].asnumpy() == last).all() and (own["a"].asnumpy() == last + 5).all()
    hvd.broadcast_parameters({})


def check_parameters_that_are_there() -> None:
    block = layers(known=True)
    before = roots(block)
    hvd.broadcast_parameters(block.collect_params(), root_rank=0)
    assert (values(block) == before).all()


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


def check_the_root_does_not_wait() -> None:
    """Ranks use their layers at different times: the root all of them before any other rank uses one."""
    block = layers()
    hvd.broadcast_parameters(block.collect_params(), root_rank=0)
    if hvd.rank() == 0:
        use(block, list(range(COUNT)))
    rc.barrier()
    same_everywhere(use(block, list(range(COUNT))))


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


def check_a_process_set() -> None:
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
