"""Gradient lists of well-known networks, in the order of the forward pass, and the buckets made of them."""

from __future__ import annotations

from typing import Dict, Iterator, List, Sequence, Tuple, Union

from .steps import resnet50_shapes

Shape = Tuple[int, ...]
Kernel = Union[int, Tuple[int, int]]

COMPUTE_S = {"resnet50": 0.36, "vgg16": 0.60, "inception3": 0.45}
"""Seconds of a step's computation in this study. Assumed, for one accelerator of the time of the articles:
ResNet-50 at 703 images/s with 256 of them, Inception V3 at 142 with 64, VGG-16 at 107 with 64."""


def shapes_of(model: str) -> List[Shape]:
    """The parameters of ``resnet50``, ``vgg16`` or ``inception3`` (without its auxiliary classifier)."""
    return {"resnet50": resnet50_shapes, "vgg16": _vgg16, "inception3": _inception3}[model]()


def bytes_of(model: str, scale: float = 1.0) -> List[int]:
    """Bytes of every gradient in float32, in the order in which backward makes them, times ``scale``."""
    found: List[int] = []
    for shape in reversed(shapes_of(model)):
        count = 1
        for length in shape:
            count *= length
        found.append(4 * max(1, int(count * scale)))
    return found


def _vgg16() -> List[Shape]:
    shapes: List[Shape] = []
    inputs = 3
    for outputs in (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512):
        shapes += [(outputs, inputs, 3, 3), (outputs,)]
        inputs = outputs
    for outputs, inputs in ((4096, 512 * 49), (4096, 4096), (1000, 4096)):
        shapes += [(outputs, inputs), (outputs,)]
    return shapes


def _convolution(inputs: int, outputs: int, kernel: Kernel) -> Iterator[Shape]:
    high, wide = (kernel, kernel) if isinstance(kernel, int) else kernel
    yield (outputs, inputs, high, wide)
    yield (outputs,)
    yield (outputs,)


def _inception3() -> List[Shape]:
    blocks: List[Sequence[Tuple[int, int, Kernel]]] = [
        [(3, 32, 3), (32, 32, 3), (32, 64, 3), (64, 80, 1), (80, 192, 3)],
        *(_block_a(inputs, pooled) for inputs, pooled in ((192, 32), (256, 64), (288, 64))),
        [(288, 384, 3), (288, 64, 1), (64, 96, 3), (96, 96, 3)],
        *(_block_c(width) for width in (128, 160, 160, 192)),
        [(768, 192, 1), (192, 320, 3), (768, 192, 1), (192, 192, (1, 7)), (192, 192, (7, 1)), (192, 192, 3)],
        *(_block_e(inputs) for inputs in (1280, 2048)),
    ]
    shapes = [shape for block in blocks for layer in block for shape in _convolution(*layer)]
    return [*shapes, (1000, 2048), (1000,)]


def _block_a(inputs: int, pooled: int) -> List[Tuple[int, int, Kernel]]:
    return [(inputs, 64, 1), (inputs, 48, 1), (48, 64, 5), (inputs, 64, 1), (64, 96, 3), (96, 96, 3),
            (inputs, pooled, 1)]  # fmt: skip


def _block_c(width: int) -> List[Tuple[int, int, Kernel]]:
    tall, flat = (7, 1), (1, 7)
    return [(768, 192, 1), (768, width, 1), (width, width, flat), (width, 192, tall), (768, width, 1),
            (width, width, tall), (width, width, flat), (width, width, tall), (width, 192, flat),
            (768, 192, 1)]  # fmt: skip


def _block_e(inputs: int) -> List[Tuple[int, int, Kernel]]:
    pair: List[Tuple[int, int, Kernel]] = [(384, 384, (1, 3)), (384, 384, (3, 1))]
    return [(inputs, 320, 1), (inputs, 384, 1), *pair, (inputs, 448, 1), (448, 384, 3), *pair,
            (inputs, 192, 1)]  # fmt: skip


def buckets_of(lengths: Sequence[int], most: int = 8) -> List[int]:
    """The same bytes in at most so many buckets, in order; each is filled until it has its part."""
    limit, buckets, filled = sum(lengths) / most, [0], 0
    for length in lengths:
        if filled >= limit:
            buckets.append(0)
            filled = 0
        buckets[-1] += length
        filled += length
    return buckets


TITLES: Dict[str, str] = {"resnet50": "ResNet-50", "vgg16": "VGG-16", "inception3": "Inception V3"}
