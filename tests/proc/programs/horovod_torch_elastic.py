"""Elastic training with the calls of Horovod's example for PyTorch, on random data.

    ringrun --horovod -np 2 --min-np 2 --max-np 4 --host-discovery-script … horovod_torch_elastic.py LOG

The process in the first slot of the host VICTIM dies in epoch 2. Rank 0 writes a line for every epoch to LOG.
Training ends after the epoch in which the file LOG.stop appears.
"""

import json
import os
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn, optim

EPOCHS, BATCH_SIZE, LR, LOG = 10000, 8, 0.01, sys.argv[1]

hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)

inputs, targets = torch.randn(160, 6), torch.arange(160) % 3
dataset = torch.utils.data.TensorDataset(inputs, targets)
sampler = hvd.elastic.ElasticSampler(dataset)
loader = torch.utils.data.DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler)

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = optim.SGD(model.parameters(), lr=LR * hvd.size(), momentum=0.5)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def dies(epoch):
    first = os.environ["HOROVOD_LOCAL_RANK"] == "0"
    return epoch == 2 and first and os.environ["HOROVOD_HOSTNAME"] == os.environ.get("VICTIM")


def metric_average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()


@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, EPOCHS + 1):  # noqa: B020  as in Horovod's example
        state.model.train()
        loss = torch.zeros(())  # if the ranks changed at the last commit of an epoch, no sample is left in it
        for state.batch, (data, target) in enumerate(loader):
            state.optimizer.zero_grad()
            loss = F.cross_entropy(state.model(data), target)
            loss.backward()
            state.optimizer.step()
            state.sampler.record_batch(state.batch, BATCH_SIZE)
            time.sleep(0.05)
            if dies(state.epoch):
                os._exit(1)
            state.commit()
        average = metric_average(loss.item(), "average")
        if hvd.rank() == 0:
            with open(LOG, "a") as file:
                facts = {"epoch": state.epoch, "size": hvd.size(), "host": os.environ["HOROVOD_HOSTNAME"]}
                facts.update(loss=average, lr=optimizer.param_groups[0]["lr"])
                file.write(json.dumps(facts) + "\n")
        if metric_average(float(Path(LOG + ".stop").exists()), "stop") > 0:
            return
        state.sampler.set_epoch(state.epoch)
        state.batch = 0


def on_state_reset():
    for group in optimizer.param_groups:
        group["lr"] = LR * hvd.size()


state = hvd.elastic.TorchState(model, optimizer, epoch=1, batch=0, sampler=sampler)
state.register_reset_callbacks([on_state_reset])
train(state)
sums = hvd.allgather(torch.stack([value.sum() for value in model.state_dict().values()])[None])
assert all(torch.equal(row, sums[0]) for row in sums), "the ranks have different weights"
print("ends with", hvd.size(), "ranks")
