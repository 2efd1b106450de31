"""Training: the same numbers over ringcomm as over Gloo."""

from __future__ import annotations

import time
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.adapters.torch_distributed.harness import Ranks


class Branches(nn.Module):
    """A network of which a part may stay unused."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.left, self.right = nn.Linear(8, 32), nn.Linear(32, 4), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor, left: bool = True, both: bool = True) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        if both:
            return self.left(hidden) + self.right(hidden)
        return self.left(hidden) if left else self.right(hidden)


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(rank * 100 + step))


def trained(
    on: Ranks, group: Any, step: Callable[[DDP, int], torch.Tensor], hook: Any = None, **options: Any
) -> list[torch.Tensor]:
    """The weights after some steps."""
    model = DDP(Branches(), process_group=group, bucket_cap_mb=0.002, **options)
    if hook is not None:
        hook(model, group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for number in range(6):
        optimizer.zero_grad()
        step(model, number)
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def like_gloo(
    on: Ranks, step: Callable[[DDP, int], torch.Tensor], hook: Any = None, off: float = 1e-6, **options: Any
) -> None:
    ours, theirs = (trained(on, group, step, hook, **options) for group in (on.ring, on.gloo))
    for mine, other in zip(ours, theirs):
        assert torch.allclose(mine, other, rtol=1e-4, atol=off), (mine - other).abs().max()
    for mine in ours:
        copy = mine.clone()
        dist.broadcast(copy, 0)
        assert torch.equal(copy, mine), "ranks differ"


def train(on: Ranks, model: nn.Module, optimizer: Any, steps: int = 4) -> None:
    for n in range(steps):
        optimizer.zero_grad()
        model(batch(on.rank, n)).square().mean().backward()
        optimizer.step()


def same_weights(on: Ranks, weights: Callable[[Any], list[torch.Tensor]]) -> None:
    """Both backends come to them."""
    for mine, other in zip(weights(on.ring), weights(on.gloo)):
        assert torch.allclose(mine, other, rtol=1e-4, atol=1e-6)


def learn(on: Ranks) -> Callable[[DDP, int], None]:
    return lambda model, n: model(batch(on.rank, n)).square().mean().backward()


def check_ddp(on: Ranks) -> None:
    """Also with gradients as views of buckets, gradients that add up, and parameters that stay unused."""

    def accumulate(model: DDP, n: int) -> None:
        with model.no_sync():
            learn(on)(model, n)
        learn(on)(model, n + 50)

    def use_a_part(model: DDP, n: int) -> None:
        model(batch(on.rank, n), left=(on.rank + n) % 2 == 0, both=False).square().mean().backward()

    for step, options in (
        (learn(on), {}), (learn(on), {"gradient_as_bucket_view": True}), (learn(on), {"static_graph": True}),
        (accumulate, {}), (use_a_part, {"find_unused_parameters": True}),
    ):  # fmt: skip
        like_gloo(on, step, **options)


def check_ddp_with_uneven_inputs(on: Ranks) -> None:
    model = DDP(nn.Linear(2, 1))
    for initial in (True, False):
        with model.join(divide_by_initial_world_size=initial):
            for n in range(2 + on.rank):
                output = model(torch.ones(1, 2) * n).sum()
                time.sleep(0.05)  # join() has counted the ranks; only DDP's reducer refers to that work
                output.backward()


def check_ddp_hooks(on: Ranks) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    step = learn(on)

    def bf16(group, bucket):
        # DDP itself refuses this hook by its name unless the backend is NCCL.
        return default_hooks.bf16_compress_hook(group, bucket)

    for plain in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
        # Gloo rounds after each addition of half types, ringcomm once.
        like_gloo(on, step, lambda model, group, plain=plain: model.register_comm_hook(group, plain), 1e-3)
    rounded = trained(on, on.ring, step, lambda model, group: model.register_comm_hook(group, bf16))
    for mine, exact in zip(rounded, trained(on, on.gloo, step)):
        assert torch.allclose(mine, exact, rtol=0.05, atol=5e-3)

    def power(model: DDP, group: Any) -> None:
        state = powerSGD_hook.PowerSGDState(
            group, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    for tensor in trained(on, on.ring, step, power):
        copy = tensor.clone()
        dist.broadcast(copy, 0)
        assert torch.allclose(copy, tensor)


class Wide(nn.Module):
    """A network with matrices that are large enough to be compressed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.Sequential(
            nn.Linear(8, 600), nn.ReLU(), nn.Linear(600, 40), nn.Tanh(), nn.Linear(40, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def wide(on: Ranks, hook: Any, steps: int = 8) -> Any:
    model = DDP(Wide(), process_group=on.ring, bucket_cap_mb=0.02)
    if hook is not None:
        model.register_comm_hook(on.ring, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    losses = []
    for number in range(steps):
        inputs = batch(on.rank, number)
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def check_ddp_with_compressed_gradients(on: Ranks) -> None:
    from ringcomm.torch.distributed import compress_hook

    exact, plain = wide(on, None)
    for compression in ("int8", "int4", "bf16", "fp16"):
        losses, weights = wide(on, compress_hook(compression))
        copy = weights.clone()
        dist.broadcast(copy, 0, group=on.ring)
        assert torch.equal(copy, weights), f"ranks differ with {compression}"
        assert not torch.equal(weights, plain), f"{compression} was not used"
        assert abs(losses[-1] - exact[-1]) < 0.1 * exact[0] + 0.05, (compression, losses, exact)
        if compression == "int8":
            assert wide(on, compress_hook(compression))[0] == losses, "two runs differ"


def check_post_local_sgd(on: Ranks) -> None:
    """PyTorch's hook averages gradients at first, then models now and then."""
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    def weights(group: Any) -> list[torch.Tensor]:
        model = DDP(Branches(), process_group=group)
        state = post.PostLocalSGDState(
            group, subgroup=None, start_localSGD_iter=2, post_local_gradient_allreduce=False
        )
        model.register_comm_hook(state, post.post_localSGD_hook)
        averager = PeriodicModelAverager(period=2, warmup_steps=2, process_group=group)
        optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), averager)
        train(on, model, optimizer, steps=9)
        return [parameter.detach().clone() for parameter in model.parameters()]

    same_weights(on, weights)


def check_ddp_with_sparse_gradients(on: Ranks) -> None:
    def weights(group: Any) -> torch.Tensor:
        torch.manual_seed(5)
        model = DDP(nn.Embedding(20, 3, sparse=True), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for n in range(3):
            optimizer.zero_grad()
            model(torch.tensor([on.rank, n, 7])).square().sum().backward()
            optimizer.step()
        return model.module.weight.detach()

    assert torch.allclose(weights(on.ring), weights(on.gloo))


def check_zero_redundancy_optimizer(on: Ranks) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def weights(group: Any) -> list[torch.Tensor]:
        model = DDP(Branches(), process_group=group)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.Adam, process_group=group, lr=0.01
        )
        train(on, model, optimizer)
        optimizer.consolidate_state_dict(0)
        return [parameter.detach() for parameter in model.parameters()]

    same_weights(on, weights)


def check_first_kind_of_fully_sharded(on: Ranks) -> None:
    """It resizes storages that have been through collectives, which ``Tensor.numpy()`` would forbid."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    def weights(group: Any) -> list[torch.Tensor]:
        model = FullyShardedDataParallel(Branches(), group, device_id=torch.device("cpu"))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        train(on, model, optimizer)
        with FullyShardedDataParallel.summon_full_params(model):
            return [parameter.detach().clone() for parameter in model.parameters()]

    same_weights(on, weights)


def check_averages_by_weights_equal_one_process(on: Ranks) -> None:
    """Unequal parts of a batch, some of which are nothing but NaN, come to the gradients of all of it."""
    from ringcomm.torch.distributed import WeightedAverage, weighted_average_hook

    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(6, 13, 8, generator=generator, dtype=torch.float64)
    bounds = {2: [0, 10, 13], 3: [0, 9, 9, 13], 4: [0, 5, 5, 6, 13]}[on.size]
    start, stop = bounds[on.rank], bounds[on.rank + 1]
    makers: Any = (
        lambda weights: torch.optim.SGD(weights, lr=0.05),
        lambda weights: torch.optim.SGD(weights, lr=0.05, momentum=0.9, weight_decay=0.01),
        lambda weights: torch.optim.Adam(weights, lr=0.01),
    )
    for group, make in [(on.ring, make) for make in makers] + [(on.gloo, makers[2])]:
        alone, weight = Branches().double(), [0]
        model = DDP(Branches().double(), process_group=group, bucket_cap_mb=0.002)
        state = WeightedAverage(lambda weight=weight: weight[0], group)
        model.register_comm_hook(state, weighted_average_hook)
        ours, reference = (make(item.parameters()) for item in (model, alone))
        for step in range(6):
            mine = inputs[step, start:stop]
            weight[:] = [len(mine)]
            mine = mine if len(mine) else torch.full((2, 8), float("nan"), dtype=torch.float64)
            for optimizer, network, rows in ((ours, model, mine), (reference, alone, inputs[step])):
                optimizer.zero_grad()
                network(rows).square().mean().backward()
                optimizer.step()
        for found, expected in zip(model.parameters(), alone.parameters()):
            assert torch.allclose(found, expected, rtol=1e-12, atol=1e-13), (found - expected).abs().max()
