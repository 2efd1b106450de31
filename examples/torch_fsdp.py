"""Train with FSDP2, write checkpoints, and go on from the newest one with another number of processes.

    ringrun -np 3 examples/torch_fsdp.py --folder checkpoints --kill-at 50          ends after 50 steps, badly
    ringrun -np 2 examples/torch_fsdp.py --folder checkpoints                       goes on after step 40
    torchrun --nproc-per-node 2 examples/torch_fsdp.py --folder checkpoints         with PyTorch's launcher

Every process keeps a share of the parameters, gradients and optimizer states, and collects a layer when it is
needed. All of them write their shares of a checkpoint; on several hosts the folder must be a shared one. The
text is Python's own manual; nothing is downloaded.
"""

import argparse
import os
import signal
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ringcomm.torch.distributed  # noqa: F401  # <--- makes the backend known

TEXT = "".join(topics[name] for name in sorted(topics))[:200_000]
ALPHABET = sorted(set(TEXT))


class Characters(nn.Module):
    """A transformer that scores the next character; its result is the loss."""

    def __init__(self, args):
        super().__init__()
        self.embed = nn.Embedding(len(ALPHABET), args.width)
        self.places = nn.Parameter(0.02 * torch.randn(args.context, args.width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(args.width, 4, 4 * args.width, 0.0, batch_first=True, norm_first=True)
            for _ in range(args.layers)
        )
        self.head = nn.Linear(args.width, len(ALPHABET))

    def forward(self, pieces):
        x = self.embed(pieces[:, :-1]) + self.places
        mask = nn.Transformer.generate_square_subsequent_mask(len(self.places))
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), pieces[:, 1:].flatten())


def newest_complete(folder):
    """The number of steps of the newest checkpoint; its ``.metadata`` is written when all shares are."""
    return max((int(path.parent.name[5:]) for path in folder.glob("step-*/.metadata")), default=0)


def main():
    parser = argparse.ArgumentParser(description="Train with FSDP2 and checkpoints over ringcomm.")
    add = parser.add_argument
    add("--folder", type=Path, default=Path("checkpoints"), help="for checkpoints [checkpoints]")
    add("--every", type=int, default=20, help="steps between checkpoints [20]")
    add("--kill-at", type=int, default=0, help="kill the last process after so many steps")
    add("--steps", type=int, default=100, help="steps of training [100]")
    add("--batch-size", type=int, default=24, help="texts per step, all processes together [24]")
    add("--context", type=int, default=48, help="characters that the model sees at once [48]")
    add("--layers", type=int, default=4, help="layers [4]")
    add("--width", type=int, default=64, help="numbers per character between layers [64]")
    args = parser.parse_args()

    # torchrun sets RANK and related variables; ringcomm:// is for ringrun, and for one process alone.
    dist.init_process_group("ringcomm", init_method=None if "RANK" in os.environ else "ringcomm://")  # <---
    rank, size = dist.get_rank(), dist.get_world_size()
    if args.batch_size % size:
        raise SystemExit(f"--batch-size {args.batch_size} cannot be divided among {size} processes.")
    torch.manual_seed(1)  # each process makes the same initial weights and keeps its share of them
    model, mesh = Characters(args), init_device_mesh("cpu", (size,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    kept = sum(parameter.to_local().numel() for parameter in model.parameters())
    print(f"rank {rank} keeps {kept} of {sum(item.numel() for item in model.parameters())} parameters")

    newest = [newest_complete(args.folder)]
    dist.broadcast_object_list(newest, 0)
    (done,) = newest
    if done:
        weights, states = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": states}
        checkpoint.load(state, checkpoint_id=args.folder / f"step-{done}")  # each process reads its new share
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
        if rank == 0:
            print(f"goes on after step {done} with {size} process(es)")
    codes = torch.tensor([ALPHABET.index(letter) for letter in TEXT])
    started, first = time.perf_counter(), done
    for step in range(done + 1, args.steps + 1):
        chooser = torch.Generator().manual_seed(step)  # the batch of a step is the same after a new start
        starts = torch.randint(len(codes) - args.context, (args.batch_size, 1), generator=chooser)
        loss = model(codes[starts + torch.arange(args.context + 1)].chunk(size)[rank])
        optimizer.zero_grad()
        loss.backward()  # FSDP averages the gradients; each process gets its share of them
        optimizer.step()
        if step == args.kill_at and rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if step % args.every == 0:
            weights, states = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": states}
            checkpoint.save(state, checkpoint_id=args.folder / f"step-{step}")
            total = loss.detach().clone()
            dist.all_reduce(total, dist.ReduceOp.AVG)
            if rank == 0:
                spent_ms = 1000 * (time.perf_counter() - started) / (step - first)
                print(f"step {step:4d}  loss {total.item():.5f}  {spent_ms:.1f} ms per step", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
