"""DTensor, DeviceMesh, tensor and context parallelism: the same numbers as one process."""

from __future__ import annotations

import itertools
from typing import Any, Dict, List, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from tests.adapters.torch_distributed.harness import Ranks

WIDTH, HEADS, WORDS = 12, 12, 29
"""``HEADS`` can be divided by 2, 3 and 4 ranks; ``WORDS`` by none, so that its shards are uneven."""


def meshes(size: int) -> List[DeviceMesh]:
    """A line of all ranks, and for an even number of ranks a rectangle and a box."""
    shapes = [(size,)] + ([(2, size // 2), (1, 2, size // 2)] if size % 2 == 0 else [])
    return [init_device_mesh("cpu", shape) for shape in shapes]


def placed(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> DTensor:
    """A tensor so placed; parts of a sum are different on each rank."""
    given = [Replicate() if item.is_partial() else item for item in placements]
    tensor = distribute_tensor(whole, mesh, given)
    local, parts = tensor.to_local(), 1
    for dimension, item in enumerate(placements):
        if item.is_partial():
            parts *= mesh.size(dimension)
    local = local / parts if parts > 1 else local
    return DTensor.from_local(
        local, mesh, placements, shape=whole.shape, stride=whole.stride(), run_check=False
    )


def check_all_pairs_of_placements(on: Ranks) -> None:
    """Every way to change the placement of a tensor, also of one whose rows cannot be divided evenly."""
    kinds = [Shard(0), Shard(1), Replicate(), Partial()]
    tensors = [torch.arange(float(rows * columns)).reshape(rows, columns) * 12 for rows, columns in (
        (8, 4), (5, 7), (1, 3), (0, 2))]  # fmt: skip
    for mesh in meshes(on.size):
        choices = list(itertools.product(kinds, repeat=mesh.ndim))
        if mesh.ndim > 2:
            choices = choices[:: 1 + len(choices) // 8]
        for whole in tensors if mesh.ndim == 1 else tensors[1:2]:
            for before, after in itertools.product(choices, choices):
                if any(item.is_partial() for item in after):
                    continue  # PyTorch makes no parts of a sum that it has not been given
                moved = placed(whole, mesh, before).redistribute(mesh, after)
                assert torch.equal(moved.full_tensor(), whole), (mesh, before, after)
                wanted = distribute_tensor(whole, mesh, after).to_local()
                assert torch.equal(moved.to_local(), wanted), (mesh, before, after)


def check_gradients_of_changed_placements(on: Ranks) -> None:
    mesh = init_device_mesh("cpu", (on.size,))
    whole = torch.arange(35.0).reshape(5, 7)
    for before, after in itertools.permutations([Shard(0), Shard(1), Replicate()], 2):
        tensor = distribute_tensor(whole, mesh, [before]).requires_grad_()
        factor = distribute_tensor(whole.cos(), mesh, [after])
        (tensor.redistribute(mesh, [after]) * factor).sum().backward()
        assert torch.allclose(tensor.grad.full_tensor(), whole.cos()), (before, after)


def check_reductions_of_partial_tensors(on: Ranks) -> None:
    mesh = init_device_mesh("cpu", (on.size,))
    mine = torch.arange(10.0) * (on.rank + 1)
    for name, wanted in (("sum", sum(range(1, on.size + 1))), ("max", on.size), ("min", 1)):
        for target in (Replicate(), Shard(0)):
            tensor = DTensor.from_local(mine.clone(), mesh, [Partial(name)], run_check=False)
            got = tensor.redistribute(mesh, [target]).full_tensor()
            assert torch.equal(got, torch.arange(10.0) * wanted), (name, target)


def check_strided_and_transposed_tensors(on: Ranks) -> None:
    """Local parts that are not contiguous, and products whose parts lie in another order."""
    mesh = init_device_mesh("cpu", (on.size,))
    whole = torch.arange(7.0 * 12).reshape(7, 12)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    for view in (rows.t(), rows[:, ::3], rows.reshape(7, 3, 4).transpose(1, 2)):
        reference = {(12, 7): whole.t(), (7, 4): whole[:, ::3]}.get(
            tuple(view.shape), whole.reshape(7, 3, 4).transpose(1, 2)
        )
        assert torch.equal(view.full_tensor(), reference)
        assert torch.equal(view.redistribute(mesh, [Replicate()]).to_local(), reference)
        assert torch.equal(view.redistribute(mesh, [Shard(view.ndim - 1)]).full_tensor(), reference)


def check_types_of_distributed_tensors(on: Ranks) -> None:
    mesh = init_device_mesh("cpu", (on.size,))
    kinds = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64,
             torch.complex64, torch.float8_e4m3fn]  # fmt: skip
    for kind in kinds:
        whole = (torch.arange(10) % 3).float().reshape(5, 2).to(kind)
        local = list(whole.view(torch.uint8 if kind.itemsize == 1 else kind).chunk(on.size))
        mine = (local[on.rank] if on.rank < len(local) else local[0][:0]).view(kind)
        tensor = DTensor.from_local(mine, mesh, [Shard(0)], shape=(5, 2), stride=(2, 1), run_check=False)
        got = tensor.full_tensor()
        assert got.dtype == kind and torch.equal(got.to(torch.complex64), whole.to(torch.complex64)), kind


def check_groups_of_a_mesh(on: Ranks) -> None:
    """Slices of a mesh, and dimensions put together, have groups of their own."""
    if on.size % 2:
        return
    mesh = init_device_mesh("cpu", (2, on.size // 2), mesh_dim_names=("dp", "tp"))
    assert mesh["tp"].get_local_rank() == on.rank % (on.size // 2)
    found: List[Any] = [None] * (on.size // 2)
    dist.all_gather_object(found, on.rank, group=mesh.get_group("tp"))
    start = on.rank - on.rank % (on.size // 2)
    assert found == list(range(start, start + on.size // 2))
    flat = mesh["dp", "tp"]._flatten("all")
    total = torch.ones(1)
    dist.all_reduce(total, group=flat.get_group())
    assert int(total) == on.size


class Layer(nn.Module):
    """A layer of a transformer with separate projections, as tensor parallelism needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.feed(self.norm_2(x + self.attend(self.norm_1(x))))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        def heads(part: torch.Tensor) -> torch.Tensor:
            return part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)

        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(-2))

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)))


class Characters(nn.Module):
    """Embedding, layers, and scores of the next character."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.double()

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def column_and_row(mesh: DeviceMesh) -> Characters:
    model = Characters()
    plan: Dict[str, Any] = {"embed": RowwiseParallel(input_layouts=Replicate())}
    for number in range(2):
        for name in "qkv":
            plan[f"layers.{number}.{name}"] = ColwiseParallel()
        plan[f"layers.{number}.up"] = ColwiseParallel()
        plan[f"layers.{number}.o"] = plan[f"layers.{number}.down"] = RowwiseParallel()
    plan["head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    return parallelize_module(model, mesh, plan)


def check_tensor_parallel_training(on: Ranks) -> None:
    """Columns, rows, an embedding whose 29 rows no number of ranks divides, and a divided loss."""
    mesh = init_device_mesh("cpu", (on.size,))
    model, alone = column_and_row(mesh), Characters()
    optimizers = [torch.optim.SGD(item.parameters(), lr=0.1) for item in (model, alone)]
    for step in range(3):
        words = torch.randint(WORDS, (4, 9), generator=torch.Generator().manual_seed(step))
        losses = []
        for network, optimizer in zip((model, alone), optimizers):
            optimizer.zero_grad()
            with loss_parallel():
                scores = network(words[:, :-1]).flatten(0, 1)
                loss = nn.functional.cross_entropy(scores, words[:, 1:].flatten())
                loss.backward()
            optimizer.step()
            losses.append(loss.full_tensor() if isinstance(loss, DTensor) else loss)
        assert torch.allclose(losses[0], losses[1], rtol=1e-9), (step, losses)
    for (name, found), expected in zip(model.named_parameters(), alone.parameters()):
        whole = found.full_tensor() if isinstance(found, DTensor) else found
        assert torch.allclose(whole, expected, rtol=1e-9, atol=1e-11), (name, (whole - expected).abs().max())


def check_sequence_parallel(on: Ranks) -> None:
    """Norms on parts of the sequence; 7 positions, which 2 to 4 ranks do not divide."""
    mesh = init_device_mesh("cpu", (on.size,))
    feed = {
        "0": SequenceParallel(),
        "1": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "1.0": ColwiseParallel(),
        "1.2": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "2": SequenceParallel(),
    }

    def build() -> nn.Sequential:
        torch.manual_seed(4)
        inner = nn.Sequential(nn.Linear(WIDTH, 24), nn.ReLU(), nn.Linear(24, WIDTH))
        return nn.Sequential(nn.LayerNorm(WIDTH), inner, nn.LayerNorm(WIDTH)).double()

    alone, model = build(), parallelize_module(build(), mesh, feed)
    whole_model = [
        PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
        PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate()),
    ]
    for style in whole_model:
        model = parallelize_module(model, mesh, style)
    x = torch.randn(3, 7, WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    for network in (model, alone):
        network(x).square().sum().backward()
    for (name, found), expected in zip(model.named_parameters(), alone.parameters()):
        whole = found.grad.full_tensor() if isinstance(found.grad, DTensor) else found.grad
        assert torch.allclose(whole, expected.grad, rtol=1e-9, atol=1e-11), name


def check_ring_attention(on: Ranks) -> None:
    """What context parallelism sends; PyTorch has its ``context_parallel()`` for GPUs only."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as context

    generator = torch.Generator().manual_seed(6)
    q, k, v = (torch.randn(2, 3, 8 * on.size, 4, generator=generator) for _ in range(3))
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    mine = [item.chunk(on.size, dim=2)[on.rank] for item in (q, k, v)]
    context._cp_options.enable_load_balance = False
    for method, causal in itertools.product(("allgather", "alltoall"), (False, True)):
        context.set_rotate_method(method)
        wanted = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        got = context._templated_ring_attention(on.ring, 2, op, *mine, is_causal=causal)[0]
        assert torch.allclose(got, wanted.chunk(on.size, dim=2)[on.rank], rtol=1e-4, atol=1e-5), method
