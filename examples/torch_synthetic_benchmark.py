"""How many images per second a network learns from, made-up images included: per process and in total.

    python examples/torch_synthetic_benchmark.py                       one process
    ringrun -np 2 examples/torch_synthetic_benchmark.py                two on this machine

It is Horovod's benchmark of the same name, with networks that need nothing but PyTorch. With torchvision
installed, --model takes the name of any of its classifiers (resnet50, vgg16, ...).
"""

import argparse
import os
import statistics
import sys
import time

try:
    import torch
    from torch import nn
    from torch.nn import functional as F  # noqa: N812 - the usual name
except ModuleNotFoundError as missing:
    raise SystemExit(
        f"This example needs {missing.name}, which is missing here. "
        f"Install it: {sys.executable} -m pip install {missing.name}"
    ) from None

import ringcomm.torch as hvd


class Block(nn.Module):
    """Two convolutions with a way around them."""

    def __init__(self, before, after, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        same = before == after and stride == 1
        self.around = nn.Identity() if same else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, maps):
        """Maps of features to maps of features."""
        inner = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(maps)))))
        return F.relu(inner + self.around(maps))


def residual_network(widths, blocks, classes=1000):
    """A network like ResNet-18, of any width."""
    layers = [nn.Conv2d(3, widths[0], 7, 2, 3, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU(),
              nn.MaxPool2d(3, 2, 1)]  # fmt: skip
    before = widths[0]
    for level, width in enumerate(widths):
        for block in range(blocks):
            layers.append(Block(before, width, 2 if level and not block else 1))
            before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))


def make_model(name):
    """One of ours, or one of torchvision's."""
    if name == "small":
        return residual_network((16, 32, 64), 1, 100)
    if name == "resnet18":
        return residual_network((64, 128, 256, 512), 2)
    try:
        from torchvision import models
    except ModuleNotFoundError:
        raise SystemExit(
            f"--model {name} needs torchvision, which is missing here. Without it there are small and "
            f"resnet18. Install it: {sys.executable} -m pip install torchvision"
        ) from None
    return getattr(models, name)()


def main():
    parser = argparse.ArgumentParser(description="Images per second with PyTorch and ringcomm.torch.")
    add = parser.add_argument
    add("--model", default="resnet18", help="small, resnet18, or a classifier of torchvision [resnet18]")
    add("--batch-size", type=int, default=16, help="images per step and process [16]")
    add("--image-size", type=int, default=64, help="width and height of the images [64]")
    add("--num-warmup-batches", type=int, default=2, help="steps that do not count [2]")
    add("--num-batches-per-iter", type=int, default=5, help="steps per measurement [5]")
    add("--num-iters", type=int, default=5, help="measurements [5]")
    add("--fp16-allreduce", action="store_true", help="send gradients in half precision")
    add("--use-adasum", action="store_true", help="combine gradients by Adasum")
    add("--no-cuda", action="store_true", help="do without GPUs")
    args = parser.parse_args()

    hvd.init()
    device = torch.device("cpu")
    if torch.cuda.is_available() and not args.no_cuda:
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
        device = torch.device("cuda")
    if "OMP_NUM_THREADS" not in os.environ:  # ringrun has not shared the cores out
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // hvd.local_size()))

    model = make_model(args.model).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=device)
    labels = torch.randint(100, (args.batch_size,), device=device)

    def steps(count):
        for _ in range(count):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()

    if hvd.rank() == 0:
        numbers = sum(item.numel() for item in model.parameters())
        print(f"model {args.model}, {numbers / 1e6:.1f} million parameters, batches of {args.batch_size} on "
              f"{hvd.size()} process(es)")  # fmt: skip
    steps(args.num_warmup_batches)
    rates = []
    for number in range(1, args.num_iters + 1):
        hvd.barrier()
        started = time.perf_counter()
        steps(args.num_batches_per_iter)
        rates.append(args.batch_size * args.num_batches_per_iter / (time.perf_counter() - started))
        if hvd.rank() == 0:
            print(f"iteration {number}: {rates[-1]:.1f} images/s per process")
    mine = statistics.median(rates)
    print(f"rank {hvd.rank()}: {mine:.1f} images/s")
    all_rates = hvd.allgather(torch.tensor([mine]), name="rates")
    if hvd.rank() == 0:
        print(f"total on {hvd.size()} process(es): {all_rates.sum().item():.1f} images/s")


if __name__ == "__main__":
    main()
