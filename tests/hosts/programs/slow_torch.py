"""Train a model of 0.4 MB over slow links. Every rank prints how many steps it has made with how many ranks,
and at the end the digest of what it has learnt.

Variables: STEPS (least number of steps), GO_ON (a file: training does not end before it is gone).
"""

import hashlib
import os
from pathlib import Path

import torch

import ringcomm.torch as hvd

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(100, 500), torch.nn.ReLU(), torch.nn.Linear(500, 100))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, step=0)


def goes_on(step: int) -> bool:
    """The same on all ranks."""
    if step < int(os.environ["STEPS"]):
        return True
    return bool(hvd.broadcast(torch.tensor([Path(os.environ["GO_ON"]).exists()]), 0)[0])


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    while goes_on(state.step):
        torch.manual_seed(1000 * state.step + hvd.rank())
        optimizer.zero_grad()
        model(torch.randn(16, 100)).square().mean().backward()
        optimizer.step()
        state.step += 1
        print(f"step {state.step} of {hvd.size()} ranks", flush=True)
        state.commit()


train(state)
learnt = b"".join(value.detach().numpy().tobytes() for value in model.state_dict().values())
print(f"digest {hashlib.sha256(learnt).hexdigest()[:16]} of {hvd.size()} ranks", flush=True)
