"""What compression.py compares: all-reduces, and steps with ResNet-50's gradients, each ready in its turn.

Their computation sleeps: the ranks of that benchmark share the cores of one machine, and machines do not.
"""

from __future__ import annotations

import math
import time
from typing import Any, Callable, Dict, List

Step = Callable[[], Any]
LOCAL_STEPS = 16


def gradients_of(scale: float, backward_s: float, forward_s: float = 0.0, evenly: bool = False) -> Any:
    """ResNet-50's parameters as layers whose passes sleep, each by the layer's share of all elements.

    Or each equally long: ResNet-50's last layers have most of the elements, and not more computation.
    """
    import torch

    from .steps import resnet50_shapes

    shapes = [(max(1, int(shape[0] * scale)), *shape[1:]) for shape in resnet50_shapes()]
    total = sum(torch.Size(shape).numel() for shape in shapes)

    def share_of(part: Any) -> float:
        return float(1 / len(shapes) if evenly else part.numel() / total)

    class Touch(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, flow: Any, part: Any, gradient: Any) -> Any:
            ctx.gradient = gradient
            return flow.clone()

        @staticmethod
        def backward(ctx: Any, flow: Any) -> Any:
            time.sleep(backward_s * share_of(ctx.gradient))
            return flow, ctx.gradient, None

    class Layer(torch.nn.Module):
        def __init__(self, shape: Any) -> None:
            super().__init__()
            self.part = torch.nn.Parameter(torch.ones(shape))
            self.gradient = 1e-3 * torch.randn(shape)

        def forward(self, flow: Any) -> Any:
            if forward_s:
                time.sleep(forward_s * share_of(self.part))
            return Touch.apply(flow, self.part, self.gradient)

    return torch.nn.Sequential(*map(Layer, shapes))


def still(model: Any) -> Any:
    """An optimizer whose step costs nothing."""
    import torch

    class Still(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            """Leave the parameters as they are."""

    return Still(model.parameters(), lr=0.1)


def all_reduces(scale: float, gloo: Any) -> Dict[str, Step]:
    """The collectives to compare."""
    import numpy as np
    import torch
    import torch.distributed as dist

    import ringcomm as rc

    count = int(25_557_032 * scale)
    array = np.random.default_rng(rc.rank()).standard_normal(count).astype(np.float32)
    tensor = torch.from_numpy(array.copy())
    found: Dict[str, Step] = {"Gloo float32": lambda: dist.all_reduce(tensor, group=gloo)}

    def add(name: str, codec: Any) -> None:
        found[name] = lambda: rc.allreduce_(array, compression=codec)

    add("ringcomm float32", None)
    for codec in ("bf16", "int8", "int4"):
        add(f"ringcomm {codec}", codec)
    return found


def ddp(
    gloo: Any, scale: float, backward_s: float, hook: Any = None, state: Any = None, cap: int = 25
) -> Step:
    """A step of DistributedDataParallel over Gloo, with buckets of ``cap`` MB."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(
        gradients_of(scale, backward_s), process_group=gloo, gradient_as_bucket_view=True, bucket_cap_mb=cap
    )
    if hook is not None:
        model.register_comm_hook(state, hook)
    factor = torch.ones(())
    return lambda: model(factor).backward()


def training_steps(scale: float, backward_s: float, gloo: Any) -> Dict[str, Callable[[], Step]]:
    """Return what makes the training steps to compare; each is made when it is its turn, to save memory."""
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    import ringcomm.torch as hvd

    def distributed(compression: Any) -> Step:
        model = gradients_of(scale, backward_s)
        optimizer = hvd.DistributedOptimizer(still(model), model.named_parameters(), compression=compression)
        factor = torch.ones(())

        def step() -> None:
            model(factor).backward()
            optimizer.step()

        return step

    def bf16(group: Any, bucket: Any) -> Any:
        return default_hooks.bf16_compress_hook(group, bucket)  # DDP refuses the function itself with Gloo

    bf16.__annotations__.clear()  # annotations that are text do not pass DDP's check

    def alone() -> Step:
        model = gradients_of(scale, backward_s)
        factor = torch.ones(())
        return lambda: model(factor).backward()

    def local(fragments: int = 1, overlap: int = 0, every: Any = LOCAL_STEPS) -> Step:
        model = gradients_of(scale, backward_s)
        optimizer = still(model)
        outer = hvd.LocalSGD(model, optimizer, every, compression="int8", fragments=fragments,
                             overlap=overlap, max_drift=math.inf)  # fmt: skip
        outer.__enter__()
        factor = torch.ones(())

        def step() -> None:
            started = time.perf_counter()
            for _ in range(LOCAL_STEPS):
                model(factor).backward()
                optimizer.step()
            means.append((time.perf_counter() - started) / LOCAL_STEPS)

        means: List[float] = []
        step.means = means  # type: ignore[attr-defined]
        return step

    def torchs_power() -> Step:
        state = powerSGD_hook.PowerSGDState(gloo, matrix_approximation_rank=4, start_powerSGD_iter=2)
        # With several buckets ranks start the hook's later collectives in different sequences: Gloo aborts.
        return ddp(gloo, scale, backward_s, powerSGD_hook.powerSGD_hook, state, 1000)

    return {
        "no communication": alone,
        "DDP, Gloo": lambda: ddp(gloo, scale, backward_s),
        "DDP, Gloo, bf16 hook": lambda: ddp(gloo, scale, backward_s, bf16, gloo),
        "DDP, Gloo, PowerSGD 4 hook": torchs_power,
        "ringcomm float32": lambda: distributed("none"),
        "ringcomm bf16": lambda: distributed("bf16"),
        "ringcomm int8": lambda: distributed("int8"),
        "ringcomm int4": lambda: distributed("int4"),
        "ringcomm PowerSGD 4": lambda: distributed(hvd.PowerSGD(4)),
        "ringcomm LocalSGD, int8": lambda: local(every="auto"),
        f"ringcomm LocalSGD {LOCAL_STEPS}, int8": local,
        f"ringcomm LocalSGD {LOCAL_STEPS}, int8, streaming": lambda: local(4, 4),
    }


def overlaps(scale: float, backward_s: float, forward_s: float, rounds: int) -> Dict[str, float]:
    """Mean seconds per step with and without an overlap of the exchange with the next forward pass."""
    import torch

    import ringcomm as rc
    import ringcomm.torch as hvd

    found: Dict[str, float] = {}
    for compression in ("none", "int8"):
        for overlapping in (False, True):
            model = gradients_of(scale, backward_s, forward_s, evenly=True)
            optimizer = hvd.DistributedOptimizer(
                still(model), model.named_parameters(), compression=compression
            )
            barrier = hvd.CrossBarrier(model, optimizer) if overlapping else None
            factor = torch.ones(())
            for number in range(rounds + 2):
                if number == 2:
                    rc.barrier()
                    started = time.perf_counter()
                model(factor).backward()
                optimizer.step()
            if barrier is not None:
                barrier.close()
            rc.barrier()
            name = f"{compression}, overlapping" if overlapping else compression
            found[name] = (time.perf_counter() - started) / rounds
    return found


def exposed(scale: float, backward_s: float, rounds: int) -> Dict[str, Dict[str, List[float]]]:
    """Return where a step with int8 is longer than one without communication, in seconds.

    ``backward``: until the backward pass has ended; ``waited``: how long its thread was ready meanwhile, but
    had no core; ``computed``: what the thread computed; ``after``: from then until the step was finished;
    ``process``: processor time of all threads.
    """
    import threading

    import torch

    import ringcomm as rc
    import ringcomm.torch as hvd

    place = f"/proc/self/task/{threading.get_native_id()}/schedstat"

    def scheduled() -> List[float]:
        with open(place) as file:
            return [int(word) * 1e-9 for word in file.read().split()[:2]]

    found: Dict[str, Dict[str, List[float]]] = {}
    for name in ("no communication", "int8"):
        model = gradients_of(scale, backward_s)
        optimizer = still(model)
        if name == "int8":
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression="int8")
        factor = torch.ones(())
        parts = found[name] = {part: [] for part in ("backward", "waited", "computed", "after", "process")}
        for number in range(rounds + 2):
            rc.barrier()
            before, worked, started = scheduled(), time.process_time(), time.perf_counter()
            model(factor).backward()
            ended, after = time.perf_counter(), scheduled()
            optimizer.step()
            taken = {"backward": ended - started, "waited": after[1] - before[1],
                     "computed": after[0] - before[0], "after": time.perf_counter() - ended,
                     "process": time.process_time() - worked}  # fmt: skip
            for part, seconds in taken.items() if number >= 2 else ():
                parts[part].append(seconds)
    return found


AUTO_WARM_UP = 7
"""Steps without compression, after which the choice is made; the first is not counted."""


def choices(scale: float, backward_s: float, rounds: int) -> Dict[str, Any]:
    """Seconds per step without compression, with bf16, int8 and after the choice; and the predictions."""
    import torch

    import ringcomm as rc
    import ringcomm.torch as hvd

    def steps_of(compression: str) -> Any:
        model = gradients_of(scale, backward_s)
        optimizer = hvd.DistributedOptimizer(still(model), model.named_parameters(), compression=compression)
        factor = torch.ones(())

        def steps(count: int) -> List[float]:
            rc.barrier()
            times = [time.perf_counter()]
            for _ in range(count):
                model(factor).backward()
                optimizer.step()
                times.append(time.perf_counter())
            return [last - first for first, last in zip(times, times[1:])]

        return optimizer, steps

    optimizer, steps = steps_of("auto")
    found: Dict[str, Any] = {"none": steps(AUTO_WARM_UP)[1:]}
    choice = optimizer._reducer._auto.choice
    found["auto"] = steps(1 + rounds)[1:]
    for name in ("bf16", "int8"):
        found[name] = steps_of(name)[1](1 + rounds)[1:]
    return {"backward_s": backward_s, "chosen": choice.name, "predicted": choice.steps_s, "measured": found}
