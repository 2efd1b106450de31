"""Entering a job of several processes: by ringrun's rendezvous, a rank's own, srun, mpirun, or a new view.

A process that is alone in its job needs nothing of this.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

from ..config import Membership, Settings
from ..rendezvous.client import NEW, Joined, join
from ..rendezvous.control import Resume
from ..rendezvous.embedded import EmbeddedRendezvous, OwnRendezvous
from ..rendezvous.launched import join_launched


class Entry(NamedTuple):
    """A place in a job, with established links."""

    joined: Joined
    membership: Membership  # with address and key of the rendezvous
    embedded: Optional[EmbeddedRendezvous] = None  # the rendezvous that this rank serves, if it does


def enter(membership: Membership, settings: Settings, resume: Optional[Resume] = None) -> Entry:
    """Join a job of several processes, and connect to all of them.

    ExcludedError: an elastic job has no place for this process. ConfigError: a setting makes no sense.
    StartupError: the job did not start.
    """
    if membership.elastic:
        return Entry(join(membership, settings, NEW if resume is None else resume), membership)
    if membership.launched is not None:
        joined, embedded, membership = join_launched(membership, settings)
        return Entry(joined, membership, embedded)
    with OwnRendezvous(membership, settings) as own:
        joined = join(membership, settings)
    return Entry(joined, membership, own.embedded)
