"""Ray Train's configuration for PyTorch, with the backend "ringcomm"."""

from __future__ import annotations

import importlib
import secrets
from dataclasses import dataclass
from typing import Any, Dict, Optional

from ray.train.torch import TorchConfig as _TorchConfig

from .._adapter.placed import settings_for
from ..config import Settings
from ..configuration.membership import assign
from ..storage.keys import key_text, make_certificate


@dataclass
class TorchConfig(_TorchConfig):
    """``ray.train.torch.TorchConfig`` for process groups with the backend "ringcomm".

    Example: ``TorchTrainer(train, torch_config=TorchConfig(), scaling_config=ScalingConfig(num_workers=4))``.
    Every start makes a new key, so the ranks accept no other process.

    Attributes:
        backend: ``"ringcomm"``, or a list like ``"cpu:ringcomm,cuda:nccl"``.
        init_method: as in Ray: ``"env"`` or ``"tcp"``.
        timeout_s: as in Ray: seconds until operations of process groups fail.
        settings: settings of ringcomm; None: the settings of the environment.
    """

    backend: Optional[str] = "ringcomm"
    settings: Optional[Settings] = None

    @property
    def backend_cls(self) -> type:
        """The class of Ray Train's backend."""
        return _Backend


class _Backend(_TorchConfig().backend_cls):  # type: ignore[misc]
    """Ray's backend for PyTorch, on workers that have registered ringcomm's."""

    def on_start(self, worker_group: Any, backend_config: TorchConfig) -> None:
        """Register the backend and set the key on every worker; then do as Ray."""
        settings = backend_config.settings or settings_for()
        certificate = make_certificate() if settings.encrypt else ""
        variables = dict(settings.to_environment())
        variables["RINGCOMM_KEY"] = key_text(secrets.token_bytes(32), certificate)
        worker_group.execute(_prepare, variables)
        super().on_start(worker_group, backend_config)

    def on_shutdown(self, worker_group: Any, backend_config: TorchConfig) -> None:
        """Do as Ray; then remove the key from the workers, which Ray may use for something else."""
        try:
            super().on_shutdown(worker_group, backend_config)
        finally:
            worker_group.execute(assign, {})


def _prepare(variables: Dict[str, str]) -> None:
    """Register the backend, and take the key, on a worker."""
    assign(variables)
    importlib.import_module("ringcomm.torch.distributed")
