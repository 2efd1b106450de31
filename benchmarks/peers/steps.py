"""One training step's gradients as ResNet-50 has them, reduced in the ways that frameworks do it.

The modes, all of which leave the average of every gradient on every rank:

* ``per-tensor``: one call after another, in place.
* ``grouped``: one call for all of them, in place.
* ``one-bucket``: copied into one flat buffer, one call, copied back.
* ``ddp-buckets``: torch's DistributedDataParallel: last gradient first, copied (and divided) into a bucket of
  1 MB and then buckets of 25 MB, each started when it is full; copied back at the end.
* ``ddp-buckets-view``: the same with ``gradient_as_bucket_view``: the gradients live in the buckets.
* ``small-buckets-view``: the same in the buckets of ringcomm's DistributedOptimizer: 1 MiB, then 8 MiB each.
"""

from __future__ import annotations

import time
from typing import Any, Callable, Iterator, List, Sequence, Tuple

import numpy as np

from .worker import Adapter, Array, Run

Shape = Tuple[int, ...]
FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = {"ddp-buckets": 25 << 20, "ddp-buckets-view": 25 << 20, "small-buckets-view": 8 << 20}


def resnet50_shapes() -> List[Shape]:
    """ResNet-50's parameters in the order of the forward pass: 161 tensors, 25 557 032 numbers."""
    return list(_resnet50())


def _convolution(inputs: int, outputs: int, kernel: int) -> Iterator[Shape]:
    yield (outputs, inputs, kernel, kernel)
    yield (outputs,)  # the batch norm's weight and bias
    yield (outputs,)


def _resnet50() -> Iterator[Shape]:
    yield from _convolution(3, 64, 7)
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            yield from _convolution(inputs, width, 1)
            yield from _convolution(width, width, 3)
            yield from _convolution(width, 4 * width, 1)
            if block == 0:
                yield from _convolution(inputs, 4 * width, 1)
            inputs = 4 * width
    yield (1000, inputs)
    yield (1000,)


def prepare(adapter: Adapter, mode: str) -> Tuple[Run, List[Array]]:
    """The step as a call, and the gradients that it averages."""
    shapes = resnet50_shapes()
    if mode == "per-tensor":
        return _per_tensor(adapter, [adapter.array(shape) for shape in shapes])
    if mode == "grouped":
        gradients = [adapter.array(shape) for shape in shapes]
        return adapter.grouped(gradients), gradients
    if mode == "one-bucket":
        return _bucketed(adapter, [shapes])
    return _bucketed(adapter, backward_buckets(shapes, BUCKET_BYTES[mode]), view=mode.endswith("view"))


def backward_buckets(shapes: Sequence[Shape], bucket_bytes: int) -> List[List[Shape]]:
    """Gradients in the order in which backward makes them, divided as DistributedDataParallel does."""
    buckets: List[List[Shape]] = [[]]
    filled, limit = 0, FIRST_BUCKET_BYTES
    for shape in reversed(shapes):
        buckets[-1].append(shape)
        filled += 4 * int(np.prod(shape))
        if filled >= limit:
            buckets.append([])
            filled, limit = 0, bucket_bytes
    return [bucket for bucket in buckets if bucket]


def _scale(adapter: Adapter, array: Array) -> None:
    if not adapter.averages:
        np.multiply(array, np.float32(1 / adapter.size), out=array)


def _per_tensor(adapter: Adapter, gradients: List[Array]) -> Tuple[Run, List[Array]]:
    reducers = [adapter.reducer(gradient) for gradient in gradients]

    def run() -> None:
        for reduce, gradient in zip(reducers, gradients):
            reduce()
            _scale(adapter, gradient)

    return run, gradients


def _started(adapter: Adapter, array: Array) -> Callable[[], Run]:
    """Start the reduction; where the peer cannot, do it and have nothing to wait for."""
    start = adapter.starter(array)
    if start is not None:
        return start
    reduce = adapter.reducer(array)

    def run() -> Run:
        reduce()
        return lambda: None

    return run


def _bucketed(adapter: Adapter, buckets: List[List[Shape]], view: bool = False) -> Tuple[Run, List[Array]]:
    flats, places, gradients = [], [], []
    for shapes in buckets:
        counts = [int(np.prod(shape)) for shape in shapes]
        flat = adapter.array(sum(counts))
        parts = np.split(flat, np.cumsum(counts)[:-1])
        inside = [part.reshape(shape) for part, shape in zip(parts, shapes)]
        own = inside if view else [np.ones(shape, np.float32) for shape in shapes]
        flats.append(flat)
        places.append(list(zip(inside, own)))
        gradients += own
    starters = [_started(adapter, flat) for flat in flats]
    factor = np.float32(1 if adapter.averages else 1 / adapter.size)

    def fill(flat: Array, pairs: List[Tuple[Array, Array]]) -> None:
        if view:
            _scale(adapter, flat)
            return
        for inside, gradient in pairs:
            if adapter.averages:
                np.copyto(inside, gradient)
            else:
                np.multiply(gradient, factor, out=inside)

    def run() -> None:
        waits = []
        for flat, pairs, start in zip(flats, places, starters):
            fill(flat, pairs)
            waits.append(start())
        for wait, pairs in zip(waits, places):
            wait()
            if not view:
                for inside, gradient in pairs:
                    np.copyto(gradient, inside)

    return run, gradients


def torch_gradients(scale: float = 1.0, device: str = "cpu", backward_s: float = 0.0) -> Any:
    """ResNet-50's parameters as layers whose gradients exist already, and whose backward passes only sleep.

    A backward pass still adds each gradient to the one that the bucket holds, and notifies what waits for it.
    So a step is as long as its communication and the sleep: ``backward_s`` seconds, divided by elements.
    """
    import torch

    shapes = [(max(1, int(shape[0] * scale)), *shape[1:]) for shape in resnet50_shapes()]
    total = sum(torch.Size(shape).numel() for shape in shapes)

    class Touch(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, flow: Any, part: Any, gradient: Any) -> Any:
            ctx.gradient = gradient
            return flow.clone()

        @staticmethod
        def backward(ctx: Any, flow: Any) -> Any:
            if backward_s:
                time.sleep(backward_s * ctx.gradient.numel() / total)
            return flow, ctx.gradient, None

    class Layer(torch.nn.Module):
        def __init__(self, shape: Shape) -> None:
            super().__init__()
            self.part = torch.nn.Parameter(torch.ones(shape, device=device))
            self.gradient = torch.full(shape, 1e-3, device=device)

        def forward(self, flow: Any) -> Any:
            return Touch.apply(flow, self.part, self.gradient)

    return torch.nn.Sequential(*map(Layer, shapes))


def still(parameters: Any) -> Any:
    """An optimizer that leaves the parameters as they are."""
    import torch

    class Still(torch.optim.SGD):
        def step(self, closure: Any = None) -> None: ...

    return Still(parameters, lr=0.1)


def ddp_step(model: Any, group: Any = None) -> Run:
    """One forward and backward pass of DistributedDataParallel; the gradients live in the buckets."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    factor = torch.ones((), device=next(model.parameters()).device)
    return lambda: model(factor).backward()


def optimizer_step(model: Any, **options: Any) -> Run:
    """One forward and backward pass with DistributedOptimizer, and waiting for the gradients."""
    import torch

    import ringcomm.torch as hvd

    optimizer = hvd.DistributedOptimizer(still(model.parameters()), model.named_parameters(), **options)
    factor = torch.ones((), device=next(model.parameters()).device)

    def step() -> None:
        model(factor).backward()
        optimizer.step()

    return step
