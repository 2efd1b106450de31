"""Train with PyTorch while machines die, leave and join, and continue from a checkpoint in a later job.

    ringrun -np 3 --min-np 2 examples/elastic_torch.py --checkpoint model.pt          three processes here
    ringrun --min-np 2 -H localhost,desk,laptop examples/elastic_torch.py              three machines

Kill a process, pull a cable, or type "ringrun drop laptop" and "ringrun add laptop" in another terminal. The
lines marked with "<---" make the script elastic. The data are random vectors, labelled by a random matrix.
"""

import argparse
from pathlib import Path

import torch

import ringcomm.torch as hvd

parser = argparse.ArgumentParser(description="Elastic training with PyTorch and ringcomm.")
parser.add_argument("--epochs", type=int, default=20, help="how often to go through the data [20]")
parser.add_argument("--batch-size", type=int, default=32, help="vectors per step and process [32]")
parser.add_argument("--lr", type=float, default=0.01, help="learning rate of one process [0.01]")
parser.add_argument("--checkpoint", type=Path, help="file that rank 0 writes after each epoch")
args = parser.parse_args()

hvd.init()
torch.manual_seed(1)
vectors = torch.randn(1800, 20)
labels = (vectors @ torch.randn(20, 5)).argmax(1)
dataset = torch.utils.data.TensorDataset(vectors[:1440], labels[:1440])
sampler = hvd.elastic.ElasticSampler(dataset, seed=1)  # <--- divides what is left of an epoch again
loader = torch.utils.data.DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)

model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)  # <--- all that training changes


def load_checkpoint():
    """Start after the last epoch of an earlier job. Rank 0's state is what all ranks begin with."""
    saved = torch.load(args.checkpoint)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    state.epoch = saved["epoch"]
    sampler.set_epoch(state.epoch)


def save_checkpoint():
    """Replace the file at once, so that it is complete whenever the job ends."""
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": state.epoch}
    partial = args.checkpoint.with_suffix(".part")
    torch.save(saved, partial)
    partial.replace(args.checkpoint)


@hvd.elastic.run  # <--- calls it again whenever the ranks have changed
def train(state):
    print(f"rank {hvd.rank()} of {hvd.size()} is in epoch {state.epoch + 1}", flush=True)
    for group in optimizer.param_groups:  # a step of more ranks sees more vectors, so it may be larger
        group["lr"] = args.lr * hvd.size()
    while state.epoch < args.epochs:
        for number, (batch, truth) in enumerate(loader):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(batch), truth)
            loss.backward()
            optimizer.step()
            sampler.record_batch(number, len(truth))
            state.commit()  # <--- ranks change here. It copies the state: rarely, if the model is large
        state.epoch += 1
        sampler.set_epoch(state.epoch)
        if hvd.rank() == 0:
            print(f"epoch {state.epoch} is done", flush=True)
            if args.checkpoint:
                save_checkpoint()


if args.checkpoint and args.checkpoint.exists():
    load_checkpoint()
    print(f"continues after epoch {state.epoch}", flush=True)
train(state)
if hvd.rank() == 0:
    with torch.no_grad():
        right = model(vectors[1440:]).argmax(1) == labels[1440:]
    print(f"{hvd.size()} process(es) have reached {right.float().mean().item():.4f}")
