"""A process of an elastic job before it joins: the others go on meanwhile, so it has no links yet.

``init()`` of a process that is started while the job runs returns at once, and the process joins when its
state is ready: at the call of the function that ``elastic.run`` decorates, or at its first collective.
Otherwise all others would wait while it reads its data.
"""

from __future__ import annotations

import os
import socket
from typing import Optional

from ..config import Membership, Settings
from ..rendezvous.client import running_size
from .context import Context


class Newcomer:
    """Stand for the context of a process before it joins.

    Its numbers are provisional: those of the last rank if it joined now.
    """

    is_elastic = True
    is_homogeneous = False

    def __init__(self, membership: Membership, settings: Settings, size: int) -> None:
        self.membership, self.settings = membership, settings
        self.host = membership.host or socket.gethostname()
        self.rank, self.size = size, size + 1
        self.local_rank = 0 if membership.slot is None else membership.slot.local
        self.local_size = self.local_rank + 1
        self.cross_rank, self.cross_size = size, size + 1
        self._pid = os.getpid()

    def restart(self, position: int = 0) -> Context:
        """Join the next view with a state at ``position``. Raises as :func:`.default_context.restart`."""
        return Context.start(self.membership, self.settings)

    def close(self, reason: str = "", ok: bool = True) -> None:
        """Do nothing: there are no connections."""


def newcomer_of(membership: Membership, settings: Settings) -> Optional[Newcomer]:
    """Return this process as one that joins an elastic job later; None if it is among the first ranks.

    StartupError: the rendezvous does not answer.
    """
    size = running_size(membership, settings)
    return Newcomer(membership, settings, size) if size else None
