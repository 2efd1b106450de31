"""What every rank checks about training with ``torch.amp.GradScaler``: all unscale reduced gradients."""

from __future__ import annotations

import contextlib
import warnings

import torch

import ringcomm.torch as hvd
from tests.adapters.torch.harness import same_everywhere

STEPS, OVERFLOW_AT = 6, 2


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
        with optimizer.skip_synchronize() if way == "horovod" else contextlib.nullcontext():
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
