"""Train a small convolutional network on handwritten digits, as Horovod's users write it.

    python examples/torch_mnist.py                                     one process
    ringrun -np 2 examples/torch_mnist.py                              two on this machine
    ringrun -np 3 -H localhost,jetson1,jetson2 examples/torch_mnist.py three machines

Six steps turn a script for one process into one for any number; they are marked below. Without --data
it learns the 1797 digits of 8 x 8 pixels that are part of scikit-learn; with --data DIRECTORY it reads
MNIST's own four files (train-images-idx3-ubyte and so on, as they are or with .gz). Nothing is downloaded.
"""

import argparse
import gzip
import hashlib
import os
import sys
import time
from pathlib import Path

import numpy as np

try:
    import torch
    from torch import nn
    from torch.nn import functional as F  # noqa: N812 - the usual name
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler
except ModuleNotFoundError as missing:
    raise SystemExit(
        f"This example needs {missing.name}, which is missing here. "
        f"Install it: {sys.executable} -m pip install {missing.name}"
    ) from None

import ringcomm.torch as hvd


class Net(nn.Module):
    """Two convolutions and two layers on top; for images of any size."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=3, padding=1)
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, images):
        """The logarithms of the ten digits' probabilities."""
        maps = F.relu(F.max_pool2d(self.conv1(images), 2 if images.shape[-1] > 8 else 1))
        maps = F.relu(F.adaptive_max_pool2d(self.conv2(maps), 4))
        return F.log_softmax(self.fc2(F.relu(self.fc1(maps.flatten(1)))), dim=1)


def idx_file(directory, name):
    """One of MNIST's files as an array."""
    path = Path(directory) / name
    packed = path.with_name(name + ".gz")
    data = path.read_bytes() if path.exists() else gzip.decompress(packed.read_bytes())
    dims = data[3]
    shape = np.frombuffer(data, ">i4", dims, 4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * dims).reshape(shape)


def load(directory):
    """Images and labels to learn from, and to test with."""
    if directory:
        arrays = [
            idx_file(directory, f"{part}-{kind}")
            for part in ("train", "t10k")
            for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")
        ]
        brightest = 255
    else:
        try:
            from sklearn.datasets import load_digits
        except ModuleNotFoundError:
            raise SystemExit(
                "This example needs scikit-learn (or MNIST's files, see --data), which is missing here. "
                f"Install it: {sys.executable} -m pip install scikit-learn"
            ) from None
        images, labels = load_digits(return_X_y=True)
        images = images.reshape(-1, 8, 8)
        arrays = [images[:1437], labels[:1437], images[1437:], labels[1437:]]
        brightest = 16
    tensors = [torch.from_numpy(np.array(array)) for array in arrays]
    train = TensorDataset(tensors[0].float().unsqueeze(1) / brightest, tensors[1].long())
    test = TensorDataset(tensors[2].float().unsqueeze(1) / brightest, tensors[3].long())
    return train, test


def train_epoch(model, loader, optimizer, sampler, epoch, device, balanced=False):
    """Go through this process's share of the images once; the average loss over all images."""
    model.train()
    sampler.set_epoch(epoch)
    total = seen = 0.0
    for images, labels in loader:
        weight = sampler.weight if balanced else len(labels)  # 0: these images are another process's
        optimizer.zero_grad()
        loss = F.nll_loss(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        total += weight * loss.item()
        seen += weight
    return hvd.allreduce(torch.tensor(total / max(seen, 1.0)), name="loss", weight=seen).item()


def accuracy(model, loader, device):
    """The share of test images that are read correctly, each process having read its part."""
    model.eval()
    counts = torch.zeros(2)
    with torch.no_grad():
        for images, labels in loader:
            right = model(images.to(device)).argmax(dim=1) == labels.to(device)
            counts += torch.tensor([float(right.sum()), len(labels)])
    counts = hvd.allreduce(counts, op=hvd.Sum, name="accuracy")
    return (counts[0] / counts[1]).item()


def main():
    parser = argparse.ArgumentParser(description="Handwritten digits with PyTorch and ringcomm.torch.")
    add = parser.add_argument
    add("--data", help="directory with MNIST's four files [scikit-learn's digits]")
    add("--epochs", type=int, default=10, help="how often to go through all images [10]")
    add("--batch-size", type=int, default=32, help="images per step and process [32]")
    add("--lr", type=float, default=0.02, help="learning rate of one process [0.02]")
    add("--fp16-allreduce", action="store_true", help="send gradients in half precision")
    add("--balanced", action="store_true", help="give slow machines fewer images; --batch-size is for all")
    add("--use-adasum", action="store_true", help="combine gradients by Adasum")
    add("--checkpoint", help="where rank 0 saves the model at the end")
    args = parser.parse_args()

    # 1. Find the other processes.
    hvd.init()
    torch.manual_seed(42 + hvd.rank())

    # 2. One GPU for each process, if there are GPUs; a fair share of the cores if not.
    device = torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
        device = torch.device("cuda")
    if "OMP_NUM_THREADS" not in os.environ:  # ringrun has not shared the cores out
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // hvd.local_size()))

    # 3. Each process gets its part of the data.
    train, test = load(args.data)
    batches = None
    if args.balanced:
        sampler = batches = hvd.BalancedBatches(train, global_batch=args.batch_size, seed=1)
        train_loader = DataLoader(train, batch_sampler=batches)
    else:
        sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank(), seed=1)
        train_loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler)
    test_part = torch.utils.data.Subset(test, range(hvd.rank(), len(test), hvd.size()))
    test_loader = DataLoader(test_part, batch_size=500)

    # 4. With more processes a step sees more images, so it may be larger. (Adasum sees to that itself, and
    # with --balanced a step sees as many images as with one process.)
    model = Net().to(device)
    scale = 1 if args.use_adasum or args.balanced else hvd.size()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * scale, momentum=0.9)

    # 5. Gradients are reduced over all processes before each step.
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        batches=batches,
    )

    # 6. All ranks start from rank 0's weights.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(1, args.epochs + 1):
        started = time.perf_counter()
        loss = train_epoch(model, train_loader, optimizer, sampler, epoch, device, args.balanced)
        trained = time.perf_counter() - started
        reached = accuracy(model, test_loader, device)
        if args.balanced:
            print(f"rank {hvd.rank()}: epoch {epoch:2d}  {trained:.2f} s  test accuracy {reached:.4f}  "
                  f"batches of {sampler.shares[hvd.rank()]}", flush=True)  # fmt: skip
        if hvd.rank() == 0:
            print(f"epoch {epoch:2d}  loss {loss:.4f}  test accuracy {reached:.4f}  "
                  f"{time.perf_counter() - started:.2f} s")  # fmt: skip

    weights = b"".join(item.detach().cpu().numpy().tobytes() for item in model.parameters())
    print(f"rank {hvd.rank()}: weights have digest {hashlib.sha256(weights).hexdigest()[:16]}")
    if hvd.rank() == 0:  # one saves for all
        if args.checkpoint:
            torch.save(model.state_dict(), args.checkpoint)
        print(f"{hvd.size()} process(es) have reached {reached:.4f}")


if __name__ == "__main__":
    main()
