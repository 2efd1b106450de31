"""Ray Train's workers as the ranks of a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, Optional
from weakref import WeakKeyDictionary

import ray
from ray.train.backend import Backend, BackendConfig

from .._adapter.placed import PlacedJob, enter, settings_for
from ..config import Settings
from . import host_of_worker

# The jobs by their groups of workers: Ray makes one backend for all trainers of a process.
_jobs: WeakKeyDictionary[Any, PlacedJob] = WeakKeyDictionary()


@dataclass
class RingcommConfig(BackendConfig):
    """Makes the workers of a Ray trainer ranks of one job, for NumPy, TensorFlow, Keras and JAX.

    Example: ``DataParallelTrainer(train, backend_config=RingcommConfig(), scaling_config=...)``, in which
    ``train`` calls ``ringcomm.init()`` (or ``ringcomm.tensorflow.init()``, ...). ``rank()`` is Ray's world
    rank.

    Attributes:
        settings: settings of the job; None: the settings of the environment.
    """

    settings: Optional[Settings] = None

    @property
    def backend_cls(self) -> type:
        """The class of Ray Train's backend."""
        return _RingcommBackend

    def to_dict(self) -> Dict[str, Any]:
        """Return the settings that differ from the defaults, for Ray's records."""
        return {} if self.settings is None else dict(self.settings.to_environment())


class _RingcommBackend(Backend):
    """Open a job before the training function runs, and close it after that."""

    def on_start(self, worker_group: Any, backend_config: RingcommConfig) -> None:
        """Give every worker its rank. Ray calls it again when it has replaced lost workers."""
        _close(worker_group)
        settings = backend_config.settings or settings_for()
        hosts = worker_group.execute(host_of_worker)
        job = _jobs[worker_group] = PlacedJob("ray-train", len(worker_group), settings, hosts)
        ray.get([
            worker_group.execute_single_async(rank, enter, ticket) for rank, ticket in enumerate(job.tickets)
        ])  # fmt: skip

    def on_shutdown(self, worker_group: Any, backend_config: RingcommConfig) -> None:
        """Close the job. Ray ends the workers."""
        _close(worker_group)


def _close(worker_group: Any) -> None:
    job = _jobs.pop(worker_group, None)
    if job is not None:
        job.close()
