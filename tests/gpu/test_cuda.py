"""The suite of arrays on devices, on a CUDA device; all ranks use the same one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ringcomm.config import Settings
from ringcomm.testing.cluster import run_ranks
from tests.gpu.labs import LABS, TorchLab
from tests.support.device_contract import CHECKS

SETTINGS = Settings(spin_us=0.0, timeout_s=60.0, start_timeout_s=60.0)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.__name__)
@pytest.mark.parametrize("transport", ["memory", "auto"])
def test_numbers_are_those_of_numpy_arrays(lab, check, transport):
    made = lab()
    run_ranks(2, lambda context: check(context, made), transport=transport, settings=SETTINGS, timeout_s=300)


def test_blocks_are_page_locked():
    torch = TorchLab().torch

    def work(context):
        array = torch.ones(100_000, device="cuda")
        context.allreduce_(array)
        torch.cuda.synchronize()
        block = context.staging.take(next(iter(context.staging._engines.values())), array.nbytes)
        return torch.from_numpy(block).is_pinned()

    assert run_ranks(2, work, settings=SETTINGS) == [True, True]


@pytest.mark.parametrize("interface", ["DistributedOptimizer", "DistributedDataParallel"])
def test_training_on_the_gpu_gives_the_curve_of_the_cpu(interface, tmp_path):
    """Two processes on one card: losses as on the CPU, within float32's rounding."""
    TorchLab()
    program = tmp_path / "train.py"
    program.write_text(TRAINING)
    curves = []
    for device in ("cpu", "cuda"):
        script = [sys.executable, str(program), device, interface]
        command = [sys.executable, "-m", "ringrun", "-np", "2", *script]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        lines = [line for line in done.stdout.splitlines() if "loss" in line]
        curves.append([float(line.split("loss ")[1]) for line in lines])
    assert len(curves[0]) == 10 and curves[0][-1] < curves[0][0]
    assert curves[1] == pytest.approx(curves[0], rel=1e-3)


TRAINING = """
import sys, torch
import ringcomm.torch as hvd
hvd.init()
device, interface = sys.argv[1:]
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 1)).to(device)
data = torch.randn(320, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
if interface != "DistributedDataParallel":
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), 0)
else:
    import ringcomm.torch.distributed
    torch.distributed.init_process_group("ringcomm")
    model = torch.nn.parallel.DistributedDataParallel(model)
for step in range(10):
    part = data[32 * step : 32 * (step + 1)][hvd.rank() :: hvd.size()].to(device)
    loss = (model(part) - part.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loss = hvd.allreduce(loss.detach(), name="loss")
    if hvd.rank() == 0:
        print("loss", loss.item(), flush=True)
if interface == "DistributedDataParallel":
    torch.distributed.destroy_process_group()
"""
