"""An elastic training with PyTorch: after some steps a rank joins, with which ten more steps are made."""

import os
import time
from pathlib import Path

import torch

import ringcomm.torch as hvd

hvd.init()
torch.manual_seed(1)
model = torch.nn.Linear(100, 100)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, step=0, together=0)


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    while state.together < 10:
        optimizer.zero_grad()
        model(torch.randn(16, 100)).square().mean().backward()
        optimizer.step()
        state.step += 1
        state.together += hvd.size() == 3
        if state.step == 4 and hvd.rank() == 0:
            Path(os.environ["HOSTS"]).write_text("localhost:3\n")
        time.sleep(0.01)
        state.commit()


train(state)
print("weights", model.weight.sum().item(), flush=True)
