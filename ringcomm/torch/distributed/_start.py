"""``init()``: join a job and make ringcomm the default backend, so that trainers use it."""

from __future__ import annotations

import sys
import warnings
import weakref
from datetime import timedelta
from typing import Any, Optional

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from ... import api
from ...config import Membership, env_rendezvous_from_environment
from ...errors import Misuse, StartupError
from ._group import BACKEND, ProcessGroupRingcomm, backend_of
from ._operations import RingcommWork
from ._rendezvous import SCHEME


def init(timeout: Optional[timedelta] = None) -> None:
    """Join the job's other processes, and make ``"ringcomm"`` the default backend for CPU tensors.

    Call it at the top of a program that uses Lightning, Fabric, Accelerate, the Hugging Face ``Trainer``,
    Composer or plain ``torch.distributed``::

        import ringcomm.torch.distributed
        ringcomm.torch.distributed.init()

    It finds the other processes under ``ringrun`` and ``torchrun``, and makes a group of one process where
    there is no launcher. A second call does nothing. Where Lightning starts its processes itself, call
    :func:`make_default` instead.

    If several ranks train and never communicate, it warns (``RuntimeWarning``) at the tenth step of an
    optimizer: then every rank trains a separate model.

    Args:
        timeout: how long a transfer of the default group may be without any progress, and how long to wait
            for the other processes to connect. None, or PyTorch's default of half an hour: 600 s for
            transfers, and half an hour for connecting. Without effect if there is a default group already.

    Raises:
        Misuse: there is a default process group of another backend.
        StartupError: (or a subclass) the processes did not connect, or a launcher has set only some of the
            variables that are needed.
    """
    make_default()
    if dist.is_initialized():
        _default_group()
        return
    uses_context = api.is_initialized()
    dist.init_process_group(BACKEND, init_method=_init_method(), timeout=timeout)
    if not uses_context:
        watch_optimizers()


def make_default() -> None:
    """Make ``"ringcomm"`` the backend for CPU tensors wherever a program names none; join no job. After it,
    ``init_process_group()`` without a backend and Lightning's ``strategy="ddp"`` use ringcomm. For Composer,
    which accepts no other backend than Gloo for CPUs, its constant is changed too, if Composer has been
    imported.
    """
    dist.Backend.default_device_backend_map["cpu"] = BACKEND
    composer = sys.modules.get("composer.devices.device_cpu")
    if composer is not None:
        composer.DeviceCPU.dist_backend = BACKEND


def local_rank() -> int:
    """Return this process's number among those of the default group on its host.

    Returns:
        0 for the first rank on each host, in the order of ranks.

    Raises:
        Misuse: CPU tensors of the default group do not go through ringcomm.
    """
    return _default_group()._transport.group.local_rank


def _default_group() -> ProcessGroupRingcomm:
    """Return the default group, or its part for CPU tensors; raise unless it uses ringcomm."""
    found = backend_of(dist.group.WORLD)
    if found is None:
        raise Misuse(
            f"There is a default process group already, and its backend is {dist.get_backend()!r}. Call "
            "ringcomm.torch.distributed.init() before anything makes a group (init_process_group, "
            "Accelerator, TrainingArguments, Trainer), or destroy that group first."
        )
    return found


def _init_method() -> str:
    """Return ``env://`` where a launcher has set its variables, else ``ringcomm://``."""
    membership = Membership.from_environment()
    unset, size = env_rendezvous_from_environment()
    if membership.elastic:
        return f"{SCHEME}://"
    if not unset:
        return "env://"
    if membership.is_alone and size > 1:
        raise StartupError(
            f"WORLD_SIZE={size} says that this is one of {size} processes, but {', '.join(unset)} is "
            "not set. Where Lightning starts its processes itself, call make_default() of this module "
            "instead of init(); else start the program with ringrun or torchrun."
        )
    return f"{SCHEME}://"


STEPS = 10  # the step of an optimizer after which the warning is given


def watch_optimizers() -> None:
    """Warn on rank 0 if each rank of the default group trains a separate model, which no error shows."""
    if dist.get_world_size() == 1 or dist.get_rank() > 0:
        return
    world, has_context = weakref.ref(dist.group.WORLD), api.is_initialized()
    steps = 0

    def after_step(*_: Any) -> None:
        nonlocal steps
        if world() is not dist.group.WORLD or world() is None:
            return
        steps += 1
        # Operations of ringcomm's other interface are not counted here.
        if steps == STEPS and not RingcommWork.any_made and api.is_initialized() == has_context:
            warnings.warn(
                f"Rank 0 of {dist.get_world_size()} has made {STEPS} optimizer steps, and no collective of "
                "torch.distributed has run: every rank trains a model of its own. On machines without a GPU "
                "Accelerate takes part only with Accelerator(cpu=True), the Hugging Face Trainer with "
                'TrainingArguments(use_cpu=True), and Lightning with a strategy ("ddp_ringcomm"); a plain '
                "model has to be wrapped in DistributedDataParallel.",
                RuntimeWarning,
                stacklevel=2,
            )

    register_optimizer_step_post_hook(after_step)
