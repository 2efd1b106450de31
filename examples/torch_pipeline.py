"""Train a transformer on characters, with its layers divided among the processes: a pipeline.

    python examples/torch_pipeline.py                                               one process, all layers
    ringrun -np 2 examples/torch_pipeline.py                                        half of the layers each
    ringrun -np 3 -H laptop,jetson1,jetson2 examples/torch_pipeline.py --schedule gpipe
    torchrun --nproc-per-node 2 examples/torch_pipeline.py                          PyTorch's launcher

No process has the whole model. A batch is cut into microbatches; each goes through the stages one after
another, so that all stages compute at the same time. The text is Python's manual; nothing is downloaded.
"""

import argparse
import os
import sys
import time
from pydoc_data.topics import topics

try:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
except ModuleNotFoundError as missing:
    raise SystemExit(
        f"This example needs torch, which is missing here ({missing.name}). "
        f"Install it: {sys.executable} -m pip install torch"
    ) from None

import ringcomm.torch.distributed  # noqa: F401  # <--- makes the backend known

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Stage(nn.Module):
    """Consecutive layers; the first stage embeds characters, the last one scores the next character.

    The initial weights depend on a layer's number, not on the stage that it is in.
    """

    def __init__(self, layers, is_first, is_last, words, args):
        super().__init__()
        torch.manual_seed(args.seed)
        self.embed = nn.Embedding(words, args.width) if is_first else None
        self.places = nn.Embedding(args.context, args.width) if is_first else None
        self.layers = nn.ModuleList()
        for number in layers:
            torch.manual_seed(args.seed + 1 + number)
            self.layers.append(
                nn.TransformerEncoderLayer(
                    args.width, 4, 4 * args.width, dropout=0.0, batch_first=True, norm_first=True
                )
            )
        torch.manual_seed(args.seed)
        self.head = nn.Sequential(nn.LayerNorm(args.width), nn.Linear(args.width, words)) if is_last else None
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(args.context))

    def forward(self, x):
        if self.embed is not None:
            x = self.embed(x) + self.places.weight
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        return x if self.head is None else self.head(x)


def main():
    parser = argparse.ArgumentParser(description="Train a character model as a pipeline over ringcomm.")
    add = parser.add_argument
    add("--schedule", choices=SCHEDULES, default="1f1b", help="the order of microbatches [1f1b]")
    add("--microbatches", type=int, default=8, help="parts of a batch [8]")
    add("--layers", type=int, default=6, help="layers of all stages together [6]")
    add("--width", type=int, default=64, help="numbers per character between layers [64]")
    add("--context", type=int, default=48, help="characters that the model sees at once [48]")
    add("--batch-size", type=int, default=32, help="texts per step [32]")
    add("--steps", type=int, default=100, help="steps of training [100]")
    add("--lr", type=float, default=0.003, help="learning rate [0.003]")
    add("--seed", type=int, default=1, help="for the initial weights and the batches [1]")
    args = parser.parse_args()

    # torchrun sets RANK and related variables; ringcomm:// is for ringrun, and for one process alone.
    dist.init_process_group("ringcomm", init_method=None if "RANK" in os.environ else "ringcomm://")  # <---
    rank, size = dist.get_rank(), dist.get_world_size()
    is_first, is_last = rank == 0, rank == size - 1
    if "OMP_NUM_THREADS" not in os.environ:  # ringrun has not shared the cores out
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    if not size <= args.layers:
        raise SystemExit(f"{args.layers} layers cannot be divided among {size} stages; use --layers {size}.")

    text = "".join(topics[name] for name in sorted(topics))
    alphabet = sorted(set(text))
    codes = torch.tensor([alphabet.index(letter) for letter in text[:200_000]])
    layers = range(args.layers * rank // size, args.layers * (rank + 1) // size)
    module = Stage(layers, is_first, is_last, len(alphabet), args)
    count = sum(parameter.numel() for parameter in module.parameters())
    print(f"stage {rank} of {size}: layers {layers.start} to {layers.stop - 1}, {count} parameters")

    schedule = SCHEDULES[args.schedule](
        PipelineStage(module, rank, size, torch.device("cpu")), args.microbatches,
        loss_fn=lambda scores, wanted: nn.functional.cross_entropy(scores.flatten(0, 1), wanted.flatten()),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(module.parameters(), lr=args.lr)
    chooser = torch.Generator().manual_seed(args.seed)  # the same on all ranks, so the batches are, too
    started = time.perf_counter()
    for step in range(1, args.steps + 1):
        starts = torch.randint(len(codes) - args.context, (args.batch_size, 1), generator=chooser)
        pieces = codes[starts + torch.arange(args.context + 1)]
        losses = []
        optimizer.zero_grad()
        inputs = [pieces[:, :-1]] if is_first else []  # later stages receive theirs
        schedule.step(*inputs, **({"target": pieces[:, 1:], "losses": losses} if is_last else {}))
        optimizer.step()
        if is_last and (step % 20 == 0 or step == args.steps):
            loss, spent_ms = torch.stack(losses).mean().item(), 1000 * (time.perf_counter() - started) / step
            print(f"step {step:4d}  loss {loss:.5f}  {spent_ms:.1f} ms per step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
