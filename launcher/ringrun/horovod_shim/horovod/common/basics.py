"""The class behind ``hvd.rank()`` and its like, for code that makes one itself."""

from __future__ import annotations

from typing import Any

import ringcomm

from . import util


class HorovodBasics:
    """Questions and answers about this process and its job. The arguments name a library: not needed."""

    Average, Sum, Adasum = ringcomm.Average, ringcomm.Sum, ringcomm.Adasum
    Min, Max, Product = ringcomm.Min, ringcomm.Max, ringcomm.Product

    shutdown = staticmethod(ringcomm.shutdown)
    is_initialized = staticmethod(ringcomm.is_initialized)
    rank = staticmethod(ringcomm.rank)
    size = staticmethod(ringcomm.size)
    local_rank = staticmethod(ringcomm.local_rank)
    local_size = staticmethod(ringcomm.local_size)
    cross_rank = staticmethod(ringcomm.cross_rank)
    cross_size = staticmethod(ringcomm.cross_size)
    is_homogeneous = staticmethod(ringcomm.is_homogeneous)

    mpi_built = staticmethod(util.mpi_built)
    gloo_built = staticmethod(util.gloo_built)
    nccl_built = staticmethod(util.nccl_built)
    ddl_built = staticmethod(util.ddl_built)
    ccl_built = staticmethod(util.ccl_built)
    cuda_built = staticmethod(util.cuda_built)
    rocm_built = staticmethod(util.rocm_built)
    mpi_enabled = mpi_threads_supported = mpi_built
    gloo_enabled = gloo_built

    def __init__(self, pkg_path: str = "", *args: Any) -> None:
        pass

    def init(self, comm: Any = None, process_sets: Any = None) -> None:
        """Join the job, and register process sets if there are some.

        Raises:
            ValueError: ``comm`` names a part of the job, or something of MPI's.
        """
        ringcomm.init()
        if comm is not None and list(comm) not in ([], list(range(ringcomm.size()))):
            raise ValueError(
                "A job of ringcomm has all ranks that ringrun started; process sets are parts of it."
            )
        for group in [] if process_sets in (None, "dynamic") else process_sets:
            ringcomm.add_process_set(group)
