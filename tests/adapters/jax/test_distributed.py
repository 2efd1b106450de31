"""``jax.distributed.initialize()`` without arguments in a job of ringrun, beside ringcomm's collectives."""

from __future__ import annotations

from typing import List, Tuple

import pytest

pytest.importorskip("jax")

from tests.adapters.jobs import run  # noqa: E402


def both(init_first: bool) -> Tuple[List[int], float, float]:
    import jax
    import jax.numpy as jnp
    from jax.experimental.multihost_utils import process_allgather

    import ringcomm.jax as hvd

    if init_first:
        hvd.init()
    jax.distributed.initialize()
    hvd.init()
    found = [jax.process_count(), jax.process_index(), hvd.rank(), len(jax.local_devices())]
    theirs = process_allgather(jnp.float32(hvd.rank())).sum()
    ours = jax.jit(hvd.psum)(jnp.float32(hvd.rank()))
    hvd.barrier()
    jax.distributed.shutdown()
    return found, float(theirs), float(ours)


@pytest.mark.cases(1)
@pytest.mark.parametrize("init_first", [False, True])
def test_jax_finds_the_processes_of_the_job(init_first: bool) -> None:
    # As in an allocation of Slurm, whose variables JAX would read otherwise: all ranks would be process 0.
    slurm = {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "nowhere", "SLURM_NTASKS": "9", "SLURM_PROCID": "0"}
    for rank, (found, theirs, ours) in enumerate(run(both, (init_first,), 2, SLURM_LOCALID="0", **slurm)):
        assert found == [2, rank, rank, 1]
        assert theirs == ours == 1.0
