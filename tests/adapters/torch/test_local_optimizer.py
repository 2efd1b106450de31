"""``--local-steps``: programs with a ``DistributedOptimizer`` make local steps without being changed."""

from __future__ import annotations

from typing import Any, Dict, List

import pytest

import ringcomm as rc
from ringcomm._adapter.local_sgd import PROBE

pytest.importorskip("torch")

import torch  # noqa: E402 - after the line above
from torch import nn  # noqa: E402

import ringcomm.torch as hvd  # noqa: E402

ENV = {"OMP_NUM_THREADS": "1"}
RANKS = 2


def model_of() -> Any:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))


def weights_of(model: Any) -> Any:
    return torch.cat([item.detach().reshape(-1) for item in model.parameters()])


def backward(model: Any, step: int, rank: int) -> None:
    """Two backward passes of a rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    for _ in range(2):
        inputs = torch.randn(4, 6, generator=generator)
        nn.functional.mse_loss(model(inputs), torch.ones(4, 2)).backward()


def train(steps: int, clips: bool, make: Any) -> Any:
    """A program as it is without local steps: the model and the optimizer."""
    model = model_of()
    optimizer = hvd.DistributedOptimizer(
        make(model.parameters(), lr=0.1), model.named_parameters(), backward_passes_per_step=2
    )
    if hvd.rank() == 1:
        weights_of(model).zero_()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, step, hvd.rank())
        if clips:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        schedule.step()
    return model, optimizer


def by_one_process(steps: int, clips: bool, make: Any) -> Any:
    """The weights of one process that averages the gradients of all ranks in every step."""
    model = model_of()
    optimizer = make(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(hvd.size()):
            backward(model, step, rank)
        for item in model.parameters():
            item.grad /= hvd.size()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        schedule.step()
    return weights_of(model)


def refused(**options: Any) -> str:
    """The error of an optimizer with these options."""
    model = nn.Linear(3, 2)
    try:
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)
    except rc.ConfigError as error:
        return str(error)
    return ""


def check_with_auto() -> List[str]:
    """Return what a rank sees with ``--local-steps auto``; its errors."""
    hvd.init()
    for clips in (False, True):
        for make in (torch.optim.SGD, torch.optim.AdamW):
            model, _ = train(PROBE - 1, clips, make)
            expected = by_one_process(PROBE - 1, clips, make)
            torch.testing.assert_close(weights_of(model), expected, atol=1e-6, rtol=1e-5)
    assert rc.stats()["ringcomm/local_steps"] == 1
    model, optimizer = train(40, False, torch.optim.AdamW)
    optimizer.average_weights()
    found = hvd.allgather(weights_of(model).reshape(1, -1))
    assert torch.equal(found[0], found[-1])
    errors = [refused(op=hvd.Sum), refused(op=hvd.Adasum)]
    model = nn.Linear(3, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 3)).sum()).backward()
    for act in (
        lambda: hvd.DistributedOptimizer(optimizer),
        lambda: hvd.LocalSGD(model, optimizer), lambda: scaler.step(optimizer),
    ):  # fmt: skip
        with pytest.raises(rc.ConfigError) as caught:
            act()
        errors.append(str(caught.value))
    return errors


@pytest.mark.release
def test_at_first_an_unchanged_program_trains_as_one_process_that_averages_gradients() -> None:
    words = (
        "this program asks for sum", "this program asks for adasum",
        "a DistributedOptimizer already", "needs the original optimizer", "does not work with a GradScaler",
    )  # fmt: skip
    for errors in rc.run(check_with_auto, np=RANKS, env=ENV, settings={"local_steps": "auto"}):
        for error, expected in zip(errors, words):
            assert expected in error


def check_with_four() -> Dict[str, Any]:
    """The weights of a rank after six steps, after their average, and after eight steps."""
    hvd.init()
    model, optimizer = train(6, True, torch.optim.SGD)
    before = weights_of(model)
    optimizer.average_weights()
    after = weights_of(model)
    model, _ = train(8, True, torch.optim.SGD)
    return {"before": before.numpy(), "after": after.numpy(), "eight": weights_of(model).numpy()}


@pytest.mark.release
def test_with_a_number_weights_are_exchanged_after_so_many_steps() -> None:
    settings = {"local_steps": "4", "compression": "bf16"}
    first, second = rc.run(check_with_four, np=RANKS, env=ENV, settings=settings)
    assert (first["before"] != second["before"]).any()
    assert (first["after"] == second["after"]).all() and (first["eight"] == second["eight"]).all()
    assert first["after"] == pytest.approx((first["before"] + second["before"]) / 2, abs=2e-3)


def test_what_is_no_number_is_refused() -> None:
    with pytest.raises(rc.ConfigError, match="auto, or a number from 1 on"):
        rc.run(rc.init, np=1, env=ENV, settings={"local_steps": "often"})
