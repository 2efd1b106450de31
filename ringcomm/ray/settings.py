"""The settings of Horovod's ``RayExecutor``, and what they mean here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Collection, Optional

from .._adapter.placed import settings_for
from ..config import Settings
from ..transport.nics import spec_of


@dataclass
class MiniSettings:
    """Settings of a :class:`RayExecutor`, by their names in Horovod.

    Attributes:
        nics: names of the network interfaces that may be used; None for all.
        verbose: not used; ``RINGCOMM_VERBOSE=1`` shows the job's progress.
        key: not used: every job makes a key.
        ssh_port: not used: Ray starts the processes.
        ssh_identity_file: not used.
        ssh_str: not used.
        timeout_s: seconds that ranks wait for each other when they start.
        placement_group_timeout_s: seconds until Ray must have reserved the resources.
        elastic: not used.
    """

    nics: Optional[Collection[str]] = None
    verbose: int = 1
    key: Optional[str] = None
    ssh_port: Optional[int] = None
    ssh_identity_file: Optional[str] = None
    ssh_str: Optional[str] = None
    timeout_s: float = 300
    placement_group_timeout_s: float = 100
    elastic: bool = False


def job_settings(given: Any) -> Settings:
    """Return the driver's settings, with the given ones in place of them.

    ``given`` is :class:`MiniSettings`, :class:`ringcomm.Settings`, an object with ``timeout_s`` and ``nics``,
    or None.
    """
    if isinstance(given, Settings):
        return given
    nics = getattr(given, "nics", None)
    timeout_s = getattr(given, "timeout_s", None)
    return settings_for(None if timeout_s is None else float(timeout_s), spec_of(nics))
