"""What every rank checks about training: it is what one process with the data of all ranks would do."""

from __future__ import annotations

import copy
import pickle
import warnings
from contextlib import nullcontext
from typing import Any, Callable, List, Optional

import torch
from torch import nn

import ringcomm.torch as hvd
from ringcomm.errors import NotOfferedError
from ringcomm.transport import arena
from tests.adapters import digits
from tests.adapters.torch.harness import same_everywhere
from tests.support.errors import raises

STEPS = 6
EACH = 4  # samples per rank and step


def model_of(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1)).double()


def data(step: int, part: Optional[int] = None) -> Any:
    """The samples of a step: of one rank, or of all together."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(EACH * hvd.size(), 6, generator=generator, dtype=torch.float64)
    targets = inputs.sin().sum(1, keepdim=True)
    own = slice(None) if part is None else slice(part * EACH, (part + 1) * EACH)
    return inputs[own], targets[own]


def loss_of(model: nn.Module, step: int, part: Optional[int] = None) -> torch.Tensor:
    inputs, targets = data(step, part)
    return (model(inputs) - targets).square().mean()


def alone(make: Callable[[nn.Module], Any], steps: int = STEPS, passes: int = 1) -> Any:
    """One process that has all the data: the losses, and the model."""
    model = model_of()
    optimizer = make(model)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(passes):
            loss = loss_of(model, step * passes + part)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return losses, model


def together(make: Callable[[nn.Module], Any], steps: int = STEPS, passes: int = 1, set_to_none: bool = True,
             **options: Any) -> Any:  # fmt: skip
    """All ranks, each with its part: the average losses, and the model."""
    model = model_of(seed=50 + hvd.rank())
    reference = model_of()
    hvd.broadcast_parameters(reference.state_dict() if hvd.rank() == 0 else model.state_dict(), 0)
    model.load_state_dict(hvd.broadcast_object(reference.state_dict(), 0))
    optimizer = hvd.DistributedOptimizer(
        make(model), named_parameters=model.named_parameters(), backward_passes_per_step=passes, **options
    )
    losses = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        for part in range(passes):
            loss = loss_of(model, step * passes + part, hvd.rank())
            loss.backward()
            losses.append(hvd.allreduce(loss.detach()).item())
        optimizer.step()
    return losses, model


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def alike(one: Any, many: Any, places: float = 1e-9) -> None:
    torch.testing.assert_close(torch.tensor(many[0]), torch.tensor(one[0]), rtol=places, atol=places)
    flat = torch.cat([parameter.detach().view(-1) for parameter in many[1].parameters()])
    expected = torch.cat([parameter.detach().view(-1) for parameter in one[1].parameters()])
    torch.testing.assert_close(flat, expected, rtol=places, atol=places)
    same_everywhere(flat)


def check_the_loss_curve_of_one_process() -> None:
    for make in (sgd, lambda model: torch.optim.AdamW(model.parameters(), lr=0.01)):
        one = alone(make)
        assert loss_of(one[1], 0) < loss_of(model_of(), 0)
        alike(one, together(make))
        alike(one, together(make, set_to_none=False))


def check_ways_to_reduce() -> None:
    one = alone(sgd)
    for groups in (1, 2, 6, 99):  # there are six parameters
        alike(one, together(sgd, groups=groups))
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        alike(one, together(sgd, num_groups=2))
    alike(one, together(sgd, gradient_predivide_factor=4.0))
    alike(one, together(sgd, compression=OwnWay))
    alike(one, together(sgd, compression=hvd.Compression.fp16), 2e-2)
    alike(one, together(sgd, compression=hvd.Compression.bf16), 5e-2)
    total = together(lambda model: torch.optim.SGD(model.parameters(), 0.05 / hvd.size(), 0.9), op=hvd.Sum)
    alike(one, total)


class OwnWay:
    """A compression that is not ours: each tensor is looked at by itself."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> Any:
        assert tensor.dim() > 0
        return tensor * 2, "twice"

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        assert context == "twice"
        return tensor / 2


def check_several_passes_per_step() -> None:
    alike(alone(sgd, passes=3), together(sgd, passes=3))
    model = model_of()
    optimizer = hvd.DistributedOptimizer(sgd(model), backward_passes_per_step=2)
    assert optimizer.backward_passes_per_step == 2
    optimizer.set_backward_passes_per_step(1)
    loss_of(model, 0, hvd.rank()).backward()
    if hvd.size() > 1:
        raises(AssertionError, lambda: loss_of(model, 0, hvd.rank()).backward(), "more than")
        raises(AssertionError, optimizer.zero_grad, "zero_grad")
    model = model_of()
    optimizer = hvd.DistributedOptimizer(sgd(model), backward_passes_per_step=3)
    loss_of(model, 0, hvd.rank()).backward()
    optimizer.step()  # earlier than announced: what there is is reduced
    same_everywhere(model[0].weight)


def check_looking_at_gradients_before_the_step() -> None:
    def clipped(model: nn.Module, optimizer: Any, part: Optional[int]) -> None:
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step, part).backward()
            if part is not None:
                optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if part is None:
                optimizer.step()
            else:
                with optimizer.skip_synchronize():
                    optimizer.step()

    one, many = model_of(), model_of()
    clipped(one, sgd(one), None)
    clipped(many, hvd.DistributedOptimizer(sgd(many)), hvd.rank())
    alike(([0.0], one), ([0.0], many))
    optimizer = hvd.DistributedOptimizer(sgd(many))
    loss_of(many, 0, hvd.rank()).backward()
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    assert ["skip_synchronize" in str(item.message) for item in caught] == [True]


def check_gradients_that_change_while_they_are_reduced_are_pointed_out() -> None:
    for compression in (hvd.Compression.none, hvd.Compression.fp16):
        for synchronizes in (False, True):
            model = model_of()
            optimizer = hvd.DistributedOptimizer(sgd(model), compression=compression)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for step in range(2):
                    optimizer.zero_grad()
                    loss_of(model, step, hvd.rank()).backward()
                    if synchronizes:
                        optimizer.synchronize()
                    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                    with optimizer.skip_synchronize() if synchronizes else nullcontext():
                        optimizer.step()
            pointed_out = ["optimizer.synchronize() first" in str(item.message) for item in caught]
            assert pointed_out == [True] * (hvd.size() > 1 and not synchronizes), caught


def check_gradients_that_the_program_keeps(memory_is_kept: bool = True) -> None:
    """What a program has put aside is not written to; what it has not is not copied."""
    model = model_of()
    optimizer = hvd.DistributedOptimizer(sgd(model))
    kept: List[torch.Tensor] = []
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step, hvd.rank()).backward()
        optimizer.synchronize()
        assert all(torch.equal(old, copy_of) for old, copy_of in kept)
        gradient = model[0].weight.grad
        kept.append(((gradient if step % 2 else gradient[0]).detach(),
                     (gradient if step % 2 else gradient[0]).clone()))  # fmt: skip
        with optimizer.skip_synchronize():
            optimizer.step()
    if hvd.size() == 1:
        return
    kept.clear()
    del gradient
    places = set()
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, step, hvd.rank()).backward()
        optimizer.step()
        places.add(model[0].weight.grad.data_ptr())
    # (Reading .grad keeps it alive no longer than this loop does.)
    assert len(places) <= 2 or not memory_is_kept, "new memory in every step"
    start = model[4].bias.grad.data_ptr()
    assert model[4].weight.grad.data_ptr() == start + 8 * model[4].bias.numel(), (
        "gradients are not neighbours"
    )


def check_sparse_gradients() -> None:
    size, rank = hvd.size(), hvd.rank()

    def embedded(distributed: bool, dense: bool, **options: Any) -> torch.Tensor:
        torch.manual_seed(8)
        model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1))
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if distributed:
            optimizer = hvd.DistributedOptimizer(optimizer, sparse_as_dense=dense, **options)
        words = [torch.tensor([step, (step * item) % 10, item]) for step in range(3) for item in range(size)]
        for step in range(3):
            optimizer.zero_grad()
            mine = words[step * size : (step + 1) * size]
            for batch in mine if not distributed else [mine[rank]]:
                (model(batch).square().mean() / (1 if distributed else size)).backward()
            assert model[0].weight.grad.is_sparse
            optimizer.step()
            assert model[0].weight.grad.is_sparse is not (distributed and dense and size > 1)
        return torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])

    expected = embedded(False, False)
    for options in ({}, {"groups": 1}, {"compression": OwnWay}):
        for dense in (False, True):
            result = embedded(True, dense, **options)
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
            same_everywhere(result)


def check_names_of_parameters_without_any_given() -> None:
    """Horovod's attribute: one name for each parameter, the same on all ranks."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [{"params": part.parameters()} for part in model]
    names = list(hvd.DistributedOptimizer(torch.optim.SGD(groups, lr=0.1))._parameter_names.values())
    assert len(set(names)) == 4 and hvd.allgather_object(names) == [names] * hvd.size()


def check_an_optimizer_that_takes_sparse_gradients_only() -> None:
    """Rank 1 has no gradient in the second step; its weights stay those of the others."""
    for dense in (False, True):
        torch.manual_seed(8)
        model = nn.Embedding(10, 4, sparse=True)
        optimizer: Any = torch.optim.SparseAdam(list(model.parameters()))
        optimizer = hvd.DistributedOptimizer(optimizer, sparse_as_dense=dense)
        for step in range(3):
            optimizer.zero_grad()
            if step != 1 or hvd.rank() != 1:
                model(torch.tensor([step, hvd.rank()])).square().sum().backward()
            optimizer.step()
            assert model.weight.grad.is_sparse
        same_everywhere(model.weight.detach())


def check_closures() -> None:
    def with_closure(model: nn.Module, optimizer: Any, part: Optional[int]) -> List[float]:
        losses = []
        for step in range(3):

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, step, part)
                loss.backward()
                return loss

            losses.append(float(optimizer.step(closure)))
        return losses

    one, many = model_of(), model_of()
    with_closure(one, torch.optim.LBFGS(one.parameters(), max_iter=3), None)
    with_closure(many, hvd.DistributedOptimizer(torch.optim.LBFGS(many.parameters(), max_iter=3)), hvd.rank())
    alike(([0.0], one), ([0.0], many), 1e-6)


def check_the_wrapped_optimizer_stays_itself() -> None:
    model = model_of()
    plain = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(plain, 0.5)
    optimizer = hvd.DistributedOptimizer(plain)
    assert isinstance(optimizer, torch.optim.SGD) and type(optimizer).__name__ == "SGD"
    later = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    loss_of(model, 0, hvd.rank()).backward()
    optimizer.step()
    plain._opt_called = True
    schedule.step()
    later.step()
    assert abs(optimizer.param_groups[0]["lr"] - 0.025) < 1e-12
    state = copy.deepcopy(optimizer.state_dict())
    other = model_of()
    resumed = hvd.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=9.0, momentum=0.9))
    resumed.load_state_dict(state)
    assert resumed.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    extra = nn.Linear(2, 1).double()
    resumed.add_param_group({"params": extra.parameters()})
    (loss_of(other, 0, hvd.rank()) + extra(torch.full((1, 2), float(hvd.rank())).double()).sum()).backward()
    resumed.step()
    same_everywhere(torch.cat([extra.weight.view(-1), other[0].weight.view(-1)]))


def check_adasum_combines_steps() -> None:
    model = model_of()
    start = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters(), op=hvd.Adasum)
    loss_of(model, 0, 0).backward()  # the same on all ranks: then the step is as if there were one
    optimizer.step()
    moved = [parameter.detach() - item for parameter, item in zip(model.parameters(), start)]
    alone_model = model_of()
    other = sgd(alone_model)
    loss_of(alone_model, 0, 0).backward()
    other.step()
    for delta, parameter, item in zip(moved, alone_model.parameters(), start):
        torch.testing.assert_close(delta, parameter.detach() - item)
    if hvd.size() > 1:
        raises(AssertionError, lambda: optimizer.skip_synchronize().__enter__(), "Adasum")


def check_a_process_set_trains_by_itself() -> None:
    if hvd.size() == 1:
        return
    group = hvd.add_process_set([0, hvd.size() - 1] if hvd.size() > 2 else [1])
    model = model_of()
    optimizer = hvd.DistributedOptimizer(sgd(model), process_set=group)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, step, hvd.rank()).backward()
        optimizer.step()
    per_rank = hvd.allgather(model[0].weight.detach().view(1, -1))
    assert torch.equal(per_rank[0], per_rank[-1]) == (hvd.size() > 2)
    assert not torch.equal(per_rank[0], per_rank[1])
    hvd.remove_process_set(group)


def check_uneven_data_with_join() -> None:
    """Rank 0 has no data in the first epoch, and less than others in the next ones."""
    model = model_of()
    hvd.broadcast_parameters(model.state_dict(), 0)
    named = [(f"uneven.{name}", parameter) for name, parameter in model.named_parameters()]
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=named)
    for steps in (5 * hvd.rank(), 4 + hvd.rank(), 4 + hvd.rank()):
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(model, step, hvd.rank()).backward()
            optimizer.step()
        hvd.broadcast_parameters(model.state_dict(), hvd.join())
    same_everywhere(model[0].weight)


def check_large_buckets_lie_in_memory_that_the_host_shares() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = nn.Linear(1000, 1200, bias=False, dtype=dtype)
        hvd.broadcast_parameters(model.state_dict(), 0)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters()
        )
        owner = arena.own()
        for step in range(3):
            optimizer.zero_grad()
            (model(torch.ones(1, 1000, dtype=dtype)).sum() * (hvd.rank() + step + 1.0)).backward()
            optimizer.step()
            gradient = model.weight.grad
            assert gradient is not None
            assert (gradient == (hvd.size() - 1) / 2 + step + 1.0).all()
            if owner is not None:
                found = owner.offset_of(gradient.data_ptr(), gradient.numel() * gradient.element_size())
                assert (found is not None) is (hvd.size() > 1)
        same_everywhere(model.weight)


def check_torch_has_the_loss_curve_of_one_process() -> None:
    model = nn.Sequential(nn.Linear(64, digits.HIDDEN), nn.ReLU(), nn.Linear(digits.HIDDEN, 10))
    for parameter, array in zip(model.parameters(), digits.weights(hvd.rank())):
        parameter.data.copy_(torch.from_numpy(array.T))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), digits.LEARNING_RATE, digits.MOMENTUM), model.named_parameters()
    )

    def step(images: Any, labels: Any) -> float:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(torch.from_numpy(images)), torch.from_numpy(labels))
        loss.backward()
        optimizer.step()
        return loss.item()

    digits.check_curve(hvd, step)


# ---- torch.amp.GradScaler: all ranks unscale reduced gradients -----------------------------------


OVERFLOW_AT = 2


def train(way: str, fused: bool, passes: int) -> torch.Tensor:
    """Train with scaled losses, one of which overflows on one rank only; return all parameters. The way
    "step" is the program of one process, "clip" also unscales and clips before, "horovod" calls
    ``synchronize()`` and ``skip_synchronize()``. `fused`: the optimizer unscales.
    """
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    own = torch.optim.Adam(model.parameters(), lr=0.01, fused=fused)
    optimizer = hvd.DistributedOptimizer(own, model.named_parameters(), backward_passes_per_step=passes)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(passes):
            generator = torch.Generator().manual_seed(100 * step + 10 * number + hvd.rank())
            loss = model(torch.randn(4, 4, generator=generator)).square().mean()
            if step == OVERFLOW_AT and hvd.rank() == hvd.size() - 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
        if way == "horovod":
            optimizer.synchronize()
        if way != "step":
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        with optimizer.skip_synchronize() if way == "horovod" else nullcontext():
            scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 1024.0 * 2 * 2 / 2  # it grew after steps 1 and 4, not because of step 2
    return torch.cat([item.detach().ravel() for item in model.state_dict().values()])


def check_the_program_of_one_process_trains_as_horovods_does() -> None:
    if not hasattr(torch.amp, "GradScaler"):  # of CPUs since PyTorch 2.3
        return
    for passes in (1, 2):
        expected = train("horovod", False, passes)
        assert torch.isfinite(expected).all()
        for fused in (False, True):
            for way in ("step", "clip"):
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    found = train(way, fused, passes)
                same_everywhere(found)
                assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6), (way, fused, passes)


def check_a_rank_without_a_backward_pass_steps_as_the_others() -> None:
    if not hasattr(torch.amp, "GradScaler"):
        return
    for fused in (False, True):
        model = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0, fused=fused))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(2):
            optimizer.zero_grad(set_to_none=False)
            if step == 0 or hvd.rank() == 0:
                scaler.scale(model(torch.ones(1, 2)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert torch.allclose(model.weight, torch.tensor(-1.0 / hvd.size()))
        same_everywhere(model.weight.detach())


# ---- gradients that are not there, not always, or not wanted -------------------------------------


class Partial(nn.Module):
    """A network of which a part is never used, and with a switch that all ranks turn at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.never = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(3, 3)
        self.last = nn.Linear(8, 1)
        self.double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(inputs).tanh()).tanh())


def partial() -> Partial:
    torch.manual_seed(8)
    return Partial()


def adam(model: nn.Module) -> Any:
    return torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1)


def momentum(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def compare(make: Callable[[nn.Module], Any], change: Callable[[Partial, int], None], **options: Any) -> None:
    """Training together gives what one process gets, whatever is changed before each step."""
    model, reference = partial(), partial()
    alone = make(reference)
    optimizer = hvd.DistributedOptimizer(make(model), model.named_parameters(), **options)
    for step in range(9):
        change(model, step)
        optimizer.zero_grad()
        loss_of(model, step, hvd.rank()).backward()
        optimizer.step()
        change(reference, step)
        alone.zero_grad()
        loss_of(reference, step).backward()
        alone.step()
    for mine, wanted in zip(model.parameters(), reference.parameters()):
        assert torch.allclose(mine, wanted, rtol=0, atol=1e-9), (mine - wanted).abs().max()
        same_everywhere(mine)


def unchanged(model: Partial, step: int) -> None:
    """Only the part that is never used has no gradients."""


def thaw(model: Partial, step: int) -> None:
    """Begin without a part that is trained later on."""
    if step in (0, 4):
        model.first.requires_grad_(step == 4)


def check_what_no_rank_uses_stays_as_it_is() -> None:
    for make in (momentum, adam):
        for options in ({}, {"groups": 2}, {"compression": OwnWay}, {"groups": 99}):
            compare(make, unchanged, **options)


def check_what_was_frozen_at_first_is_reduced_when_it_is_trained() -> None:
    for options in ({}, {"compression": OwnWay}):
        model = partial()
        model.first.requires_grad_(False)
        reference = copy.deepcopy(model)
        alone = momentum(reference)
        optimizer = hvd.DistributedOptimizer(momentum(model), model.named_parameters(), **options)
        for step in range(9):
            for one in (model, reference):
                thaw(one, step)
            loss_of(model, step, hvd.rank()).backward()
            loss_of(reference, step).backward()
            for one in (optimizer, alone):
                one.step()
                one.zero_grad()
        for mine, wanted in zip(model.parameters(), reference.parameters()):
            assert torch.allclose(mine, wanted, rtol=0, atol=1e-9)
            same_everywhere(mine)


def check_parameters_that_some_ranks_use() -> None:
    """Ranks may differ in which parameters get gradients; a missing one counts as zeros."""
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layers.parameters(), lr=1.0))
    before = [layer.bias.detach().clone() for layer in layers]
    size = hvd.size()
    for _ in range(2):
        optimizer.zero_grad()
        layers[hvd.rank() % 2](torch.ones(1, 3)).sum().backward()
        optimizer.step()
        assert layers[2].bias.grad is None
        assert layers[1].bias.grad is not None or size == 1
    for number, shares in enumerate([(size + 1) // 2, size // 2, 0]):
        moved = before[number] - layers[number].bias.detach()
        assert torch.allclose(moved, torch.full((3,), 2.0 * shares / size))
        same_everywhere(layers[number].weight)
    frozen = model_of()
    for parameter in frozen[0].parameters():
        parameter.requires_grad_(False)
    weight = frozen[0].weight.detach().clone()
    optimizer = hvd.DistributedOptimizer(sgd(frozen))
    loss_of(frozen, 0, hvd.rank()).backward()
    optimizer.step()
    assert torch.equal(frozen[0].weight, weight) and frozen[0].weight.grad is None


def check_a_batch_that_is_reduced_and_dropped() -> None:
    """What comes after ``synchronize()`` is reduced by ``step()``, with or without a warning."""
    for of_the_optimizer in (True, False):
        model, reference = model_of(), model_of()
        optimizer, alone = hvd.DistributedOptimizer(sgd(model), model.named_parameters()), sgd(reference)
        forget = optimizer.zero_grad if of_the_optimizer else model.zero_grad
        for step in range(4):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                loss_of(model, 100 + step, hvd.rank()).backward()
                optimizer.synchronize()
                forget()
                loss_of(model, step, hvd.rank()).backward()
                optimizer.step()
                forget()
            loss_of(reference, step).backward()
            alone.step()
            alone.zero_grad()
        for mine, wanted in zip(model.parameters(), reference.parameters()):
            assert torch.allclose(mine, wanted, rtol=0, atol=1e-12)


def check_what_cannot_be_wrapped_or_copied_says_so() -> None:
    model = model_of()
    optimizer = hvd.DistributedOptimizer(sgd(model))
    raises(ValueError, lambda: hvd.DistributedOptimizer(optimizer), "already")
    raises(ValueError, lambda: hvd.DistributedOptimizer(model), "this is a Sequential")
    for copied in (lambda: copy.deepcopy(optimizer), lambda: pickle.dumps(optimizer)):
        raises(NotOfferedError, copied, "cannot be copied or pickled")
    fresh = model_of()
    restored = sgd(fresh)
    restored.load_state_dict(optimizer.state_dict())
    assert hvd.DistributedOptimizer(restored).param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
