"""What every rank checks about what ranks share: states of optimizers, models, batch norms, elastic jobs."""

from __future__ import annotations

from typing import Any, List

import torch
from torch import nn

import ringcomm as rc
import ringcomm.torch as hvd
from tests.adapters.torch.checks_training import loss_of, model_of, sgd
from tests.adapters.torch.harness import same_everywhere
from tests.support.errors import raises


def check_optimizer_state_of_every_kind() -> None:
    kinds = [
        kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name != "Optimizer"
    ]
    assert len(kinds) >= 10
    for kind in kinds:
        sparse = kind.__name__ == "SparseAdam"
        for steps, wrapped in ((2, False), (0, True)):
            torch.manual_seed(hvd.rank())
            model = (
                nn.Embedding(5, 3, sparse=True) if sparse else nn.Linear(3, 2, bias=kind.__name__ != "Muon")
            )
            root = hvd.rank() == 0
            optimizer: Any = kind(model.parameters(), lr=0.1 if root else 0.7)
            for _ in range(steps if root else 0):
                go_on(model, optimizer, torch.tensor([1, 2]) if sparse else torch.ones(1, 3))
            optimizer = hvd.DistributedOptimizer(optimizer) if wrapped else optimizer
            hvd.broadcast_parameters(model.state_dict(), 0)
            hvd.broadcast_optimizer_state(optimizer, 0, model)
            described = hvd.allgather_object(describe(optimizer))
            assert all(item == described[0] for item in described), (kind, described)
            # And all can go on from there, in step.
            go_on(model, optimizer, torch.tensor([0, 2]) if sparse else torch.ones(1, 3))
            same_everywhere(next(model.parameters()))


def go_on(model: nn.Module, optimizer: Any, inputs: torch.Tensor) -> None:
    """Make a step, in the way that this kind of optimizer asks for."""

    def computed() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(inputs).square().sum()
        loss.backward()
        return loss

    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(computed)
    else:
        computed()
        optimizer.step()


def describe(optimizer: Any) -> Any:
    """Everything in an optimizer's state, as something that can be compared."""

    def plain(value: Any) -> Any:
        if torch.is_tensor(value):
            return [str(value.dtype), value.tolist()]
        if isinstance(value, dict):
            return {str(key): plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, (list, tuple)) else repr(value)

    return plain(optimizer.state_dict())


def check_broadcast_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).bfloat16()
    for parameter in model.state_dict().values():
        parameter.copy_(torch.full_like(parameter, hvd.rank()))
    root = hvd.size() - 1
    hvd.broadcast_parameters(model.named_parameters(), root)
    assert {float(item) for parameter in model.parameters() for item in parameter.view(-1)} == {float(root)}
    hvd.broadcast_parameters(model.state_dict(), root)
    assert model[1].num_batches_tracked.item() == root
    hvd.broadcast_parameters({"none": None, "extra": {"a": 1}}, 0)
    for bad in ("text", model, 3, [1, 2], torch.ones(2)):
        raises(ValueError, lambda bad=bad: hvd.broadcast_parameters(bad, 0), "invalid params of type")


def check_sync_batch_norm() -> None:
    size, rank = hvd.size(), hvd.rank()
    for dims in ((), (5,), (3, 2)):
        for momentum, affine in ((0.1, True), (None, True), (0.3, False)):
            torch.manual_seed(1)
            one = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d}[len(dims)](
                4, momentum=momentum, affine=affine
            ).double()  # fmt: skip
            many = hvd.SyncBatchNorm(4, momentum=momentum, affine=affine).double()
            rows = [2 + item % 2 * 3 for item in range(size)]
            for _ in range(2):
                whole = (100 + 3 * torch.randn(sum(rows), 4, *dims, dtype=torch.float64)).requires_grad_()
                mine = whole.detach().split(rows)[rank].clone().requires_grad_()
                weights = torch.randn_like(whole)
                expected, result = one(whole), many(mine)
                (expected * weights).sum().backward()
                (result * weights.split(rows)[rank]).sum().backward()
                torch.testing.assert_close(result, expected.split(rows)[rank])
                torch.testing.assert_close(mine.grad, whole.grad.split(rows)[rank])
            torch.testing.assert_close(many.running_mean, one.running_mean)
            torch.testing.assert_close(many.running_var, one.running_var)
            if affine:
                total = hvd.allreduce(many.weight.grad, op=hvd.Sum)
                torch.testing.assert_close(total, one.weight.grad)
            one.eval(), many.eval()
            torch.testing.assert_close(many(mine), one(mine))
    alone = hvd.SyncBatchNorm(4, track_running_stats=False).eval()
    if rank == 0:  # as torch.nn.SyncBatchNorm: in evaluation mode a rank needs no other one
        own = torch.randn(5, 4)
        torch.testing.assert_close(alone(own), nn.BatchNorm1d(4, track_running_stats=False)(own))
    raises(ValueError, lambda: hvd.SyncBatchNorm(4)(torch.ones(4)), "2D")
    half = hvd.SyncBatchNorm(3).bfloat16()
    assert half(torch.randn(4, 3, 2).bfloat16()).dtype == torch.bfloat16


def check_elastic_state() -> None:
    size, rank = hvd.size(), hvd.rank()
    model = model_of(seed=rank)
    optimizer = hvd.DistributedOptimizer(sgd(model))
    sampler = hvd.elastic.ElasticSampler(list(range(4 * size + 1)))
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=rank, best=[rank])
    state.sync()
    assert (state.epoch, state.best) == (0, [0])
    same_everywhere(model[0].weight)
    committed = model[0].weight.detach().clone()
    loss_of(model, 0, rank).backward()
    optimizer.step()
    state.epoch = 5
    sampler.record_batch(0, 2)
    state.restore()
    assert state.epoch == 0 and sampler.processed_num == 0
    assert torch.equal(model[0].weight, committed)
    state.epoch = 6
    sampler.record_batch(0, 2)
    state.commit()
    state.restore()
    assert state.epoch == 6 and sampler.processed_num == 2 * size
    taken = hvd.allgather_object(list(sampler))
    assert len({len(item) for item in taken}) == 1
    sampler.load_state_dict(sampler.state_dict())
    per_rank = [index for item in hvd.allgather_object(list(sampler)) for index in item]
    assert set(per_rank) == set(sampler.remaining_indices) and len(sampler.remaining_indices) == 2 * size + 1
    state.on_hosts_updated(1.0, 1)
    raises(hvd.HostsUpdatedInterrupt, state.check_host_updates)
    calls: List[int] = []
    resets: List[int] = []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])

    @hvd.elastic.run
    def train(state: Any, word: str) -> str:
        calls.append(state.epoch)
        if len(calls) == 1:
            state.epoch = 50
            raise rc.PeerLostError("a rank is gone")
        if len(calls) == 2:
            state.epoch = 51
            raise hvd.HostsUpdatedInterrupt(False)
        return word

    assert train(state, "done") == "done"
    assert calls == [6, 6, 51] and resets == [size, size]
