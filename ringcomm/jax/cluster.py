"""``jax.distributed.initialize()`` without arguments, in a job of ``ringrun``.

JAX asks every class derived from its ``ClusterEnv`` whether it can describe the processes of the job. That
class has no public name; if it is missing, ``initialize()`` needs its arguments.
"""

from __future__ import annotations

import socket
from typing import Any, Optional

from .. import api
from .._adapter.objects import broadcast_object
from ..config import Membership, torchrun_from_environment
from ..errors import RingcommError

try:
    from jax._src.clusters import ClusterEnv
except ImportError:  # pragma: no cover - where JAX has moved the name, which is not public
    ClusterEnv = object


class RingcommCluster(ClusterEnv):
    """Describe the ranks of this job to ``jax.distributed``."""

    name = "ringcomm"

    @classmethod
    def is_env_present(cls) -> bool:
        """Return whether this process is in a job of more than one rank, or is about to join one."""
        if api.is_initialized():
            return api.size() > 1
        try:
            return Membership.from_environment().size > 1
        except RingcommError:
            return False

    @classmethod
    def get_coordinator_address(cls, timeout_secs: Optional[int] = None, *args: Any, **kwargs: Any) -> str:
        """Return an address of rank 0 with a free port, the same on all ranks; join the job if needed."""
        api.init()
        found = None
        if api.rank() == 0:
            host = torchrun_from_environment(api.size())[1] or socket.gethostname()
            with socket.socket() as probe:
                probe.bind(("", 0))
                found = f"{host}:{probe.getsockname()[1]}"
        address: str = broadcast_object(found, 0)
        return address

    @classmethod
    def get_process_count(cls) -> int:
        """Return the number of ranks."""
        return api.size()

    @classmethod
    def get_process_id(cls) -> int:
        """Return this process's rank."""
        return api.rank()

    @classmethod
    def get_local_process_id(cls) -> Optional[int]:
        """Return None: JAX must not restrict a rank to one of its devices."""
        return None


if ClusterEnv is not object:  # pragma: no branch - as above
    # Before the others: within an allocation of Slurm, its variables do not describe ringrun's ranks.
    ClusterEnv._cluster_types.remove(RingcommCluster)
    ClusterEnv._cluster_types.insert(0, RingcommCluster)
