"""One training step's gradients as ResNet-50 has them, reduced in the ways that frameworks do it.

The modes, all of which leave the average of every gradient on every rank:

* ``per-tensor``: one call after another, in place.
* ``per-tensor-async``: all are started, then all are waited for.
* ``grouped``: one call for all of them, in place.
* ``one-bucket``: copied into one flat buffer, one call, copied back.
* ``ddp-buckets``: torch's DistributedDataParallel: last gradient first, copied (and divided) into a bucket of
  1 MB and then buckets of 25 MB, each started when it is full; copied back at the end.
* ``ddp-buckets-view``: the same with ``gradient_as_bucket_view``: the gradients live in the buckets.
* ``small-buckets-view``: the same in the buckets of ringcomm's DistributedOptimizer: 1 MiB, then 8 MiB each.
"""

from __future__ import annotations

from typing import Callable, Iterator, List, Sequence, Tuple

import numpy as np

from .worker import Adapter, Array, Run

Shape = Tuple[int, ...]
FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = {"ddp-buckets": 25 << 20, "ddp-buckets-view": 25 << 20, "small-buckets-view": 8 << 20}
MODES = ("per-tensor", "per-tensor-async", "grouped", "one-bucket", *BUCKET_BYTES)


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
    if mode == "per-tensor-async":
        return _per_tensor_async(adapter, [adapter.array(shape) for shape in shapes])
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


def _per_tensor_async(adapter: Adapter, gradients: List[Array]) -> Tuple[Run, List[Array]]:
    starters = [_started(adapter, gradient) for gradient in gradients]

    def run() -> None:
        waits = [start() for start in starters]
        for wait, gradient in zip(waits, gradients):
            wait()
            _scale(adapter, gradient)

    return run, gradients


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
