"""Generate text one character at a time, with every layer divided among the processes: tensor parallelism.

    python examples/torch_generate.py                                               one process
    ringrun -np 2 examples/torch_generate.py                                        half of every layer each
    ringrun -np 3 -H laptop,jetson1,jetson2 examples/torch_generate.py --heads 6

Each process has some heads and hidden units of every layer. Two sums per layer and character put the parts
together, so their latency decides the speed. The model is first trained for some seconds, divided in the same
way. The text is Python's own manual; nothing is downloaded.
"""

import argparse
import os
import time
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ringcomm.torch.distributed  # noqa: F401  # <--- makes the backend known

BY_COLUMNS = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
BY_ROWS = {name: RowwiseParallel() for name in ("out", "down")}  # these end with a sum over all processes


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.head_width = width // heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, past=None):
        """The result, and the keys and values so far; ``past``: those of the characters before ``x``."""
        normal = self.before(x)
        parts = (part(normal) for part in (self.query, self.key, self.value))
        q, k, v = (part.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in parts)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(nn.functional.gelu(self.up(self.between(x)))), (k, v)


class Characters(nn.Module):
    def __init__(self, words, args):
        super().__init__()
        self.embed, self.places = nn.Embedding(words, args.width), nn.Embedding(args.context, args.width)
        self.layers = nn.ModuleList(Layer(args.width, args.heads) for _ in range(args.layers))
        self.head = nn.Sequential(nn.LayerNorm(args.width), nn.Linear(args.width, words))

    def forward(self, codes, past=None):
        start = 0 if past is None else past[0][0].shape[2]
        x, now = self.embed(codes) + self.places.weight[start : start + codes.shape[1]], []
        for number, layer in enumerate(self.layers):
            x, kept = layer(x, None if past is None else past[number])
            now.append(kept)
        return self.head(x), now


def main():
    parser = argparse.ArgumentParser(description="Generate text with tensor parallelism over ringcomm.")
    add = parser.add_argument
    add("--steps", type=int, default=120, help="steps of training [120]")
    add("--context", type=int, default=128, help="characters of a text [128]")
    add("--layers", type=int, default=3, help="layers of the model [3]")
    add("--heads", type=int, default=6, help="attention heads, a multiple of the processes [6]")
    add("--width", type=int, default=96, help="numbers per character [96]")
    add("--seed", type=int, default=1, help="for weights, batches and text [1]")
    args = parser.parse_args()

    # torchrun sets RANK and related variables; ringcomm:// is for ringrun, and for one process alone.
    dist.init_process_group("ringcomm", init_method=None if "RANK" in os.environ else "ringcomm://")  # <---
    rank, size = dist.get_rank(), dist.get_world_size()
    if args.heads % size:
        raise SystemExit(f"{args.heads} heads cannot be divided among {size} processes; see --heads.")
    text = "".join(topics[name] for name in sorted(topics))
    alphabet = sorted(set(text))
    codes = torch.tensor([alphabet.index(letter) for letter in text[:200_000]])
    torch.manual_seed(args.seed)  # the same weights, batches and choices on all ranks
    model = Characters(len(alphabet), args)
    mesh = init_device_mesh("cpu", (size,))
    for layer in model.layers:
        parallelize_module(layer, mesh, {**BY_COLUMNS, **BY_ROWS})
    mine = sum(getattr(item, "to_local", lambda item=item: item)().numel() for item in model.parameters())
    print(f"rank {rank} has {mine} of {sum(item.numel() for item in model.parameters())} parameters")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    for step in range(1, args.steps + 1):
        pieces = codes[torch.randint(len(codes) - args.context, (8, 1)) + torch.arange(args.context + 1)]
        loss = nn.functional.cross_entropy(model(pieces[:, :-1])[0].flatten(0, 1), pieces[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 20 == 0:
            print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)
    given, spent_s = [alphabet.index(letter) for letter in "The "], []
    with torch.no_grad():
        scores, past = model(torch.tensor([given]))
        for _ in range(args.context - len(given)):
            began = time.perf_counter()
            given.append(int(torch.multinomial((scores[0, -1] / 0.7).softmax(0), 1)))
            scores, past = model(torch.tensor([given[-1:]]), past)
            spent_s.append(time.perf_counter() - began)
    written, texts = "".join(alphabet[code] for code in given), [None] * size
    dist.all_gather_object(texts, written)
    if set(texts) != {written}:
        raise SystemExit(f"the processes have written different texts: {texts}")
    if rank == 0:
        middle, worst = (1000 * sorted(spent_s)[int(share * len(spent_s))] for share in (0.5, 0.99))
        print(f"{written}\n{len(spent_s)} characters, the same on all {size} process(es); "
              f"{middle:.2f} ms per character (median), {worst:.2f} ms (99 %)")  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
