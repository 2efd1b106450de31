"""What a message of ``torch.distributed.pipelining`` is for: activations or gradients, and which microbatch.

PyTorch receives into tensors that its stages keep, one for each microbatch. They are looked for only when a
flight record is made while a rank waits for a message.
"""

from __future__ import annotations

import gc
import sys
from typing import Any, Iterator, Sequence

import torch

from ...group.work import Work

_STAGES = "torch.distributed.pipelining.stage"
_KINDS = (("args_recv_info", "activations"), ("grad_recv_info", "gradients"))


def purpose_of(work: Work) -> str:
    """Return for example "activations of microbatch 3 of 8 for stage 1"; "" if that is not known.

    Args:
        work: a message that is being received.
    """
    base = getattr(sys.modules.get(_STAGES), "_PipelineStageBase", None)
    tensors: Sequence[torch.Tensor] = getattr(work, "result", list)()
    if base is None or len(tensors) != 1:
        return ""
    # Threads of the program may be in PyTorch's code: their frames are not read, see engine.stacks.
    stages = [item for item in gc.get_objects() if issubclass(type(item), base)]
    return next((text for stage in stages for text in _uses(stage, tensors[0])), "")


def _uses(stage: Any, tensor: torch.Tensor) -> Iterator[str]:
    for table, what in _KINDS:
        microbatches = dict(getattr(stage, table, {}))
        for number, places in microbatches.items():
            buffers = [getattr(place, "buffer", None) for place in places]
            if any(item is not None and item.data_ptr() == tensor.data_ptr() for item in buffers):
                count = len(microbatches)
                yield f"{what} of microbatch {number + 1} of {count} for stage {stage.stage_index}"
