"""ringcomm.jax between real processes: checks, with one thread of XLA and random delays, and failures."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

import pytest

pytest.importorskip("jax")

from tests.adapters.jobs import run, run_checks, run_on  # noqa: E402 - it needs jax
from tests.proc.test_ringrun_support import Launched  # noqa: E402

SUBJECTS = ("collectives", "transformations", "training", "programs")
MODULES = [f"tests.adapters.jax.checks_{subject}" for subject in SUBJECTS]

QUICK_COMPILER = "--xla_backend_optimization_level=0"
ONE_THREAD = {
    "PJRT_NPROC": "1", "NPROC": "1",
    "XLA_FLAGS": f"--xla_cpu_multi_thread_eigen=false {QUICK_COMPILER}",
}  # fmt: skip
TWO_THREADS = {"PJRT_NPROC": "2", "NPROC": "2"}


def run_delayed(modules: Sequence[str]) -> Dict[str, str]:
    """On every rank: run checks where each collective starts after a random delay, another on each rank."""
    import ringcomm as rc
    from ringcomm._adapter.graph_callbacks import Batch
    from ringcomm.jax.programs import HostCall

    rc.init()
    draw = random.Random(rc.rank())

    def delay(kind: Any, method: str) -> None:
        prompt = getattr(kind, method)

        def late(self: Any, *args: Any, **kwargs: Any) -> Any:
            time.sleep(draw.choice((0.0, 0.0, 0.001, 0.01)))
            return prompt(self, *args, **kwargs)

        setattr(kind, method, late)

    delay(Batch, "_submit")  # of calls outside of programs
    delay(HostCall, "run")
    return run_checks(modules)


@pytest.mark.smoke
def test_everything_on_two_ranks() -> None:
    run_on(2, MODULES, TEST_JIT="hvd", XLA_FLAGS=QUICK_COMPILER, **TWO_THREADS)


@pytest.mark.release
@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "subjects"), [(1, ["collectives", "training", "programs"]), (4, ["collectives"])]
)
def test_on_other_numbers_of_ranks(ranks: int, subjects: List[str]) -> None:
    """What differs on more than the three ranks below is which ranks collectives connect."""
    modules = [module for module in MODULES if module.rpartition("_")[2] in subjects]
    assert len(modules) == len(subjects)
    run_on(ranks, modules, XLA_FLAGS=QUICK_COMPILER, **TWO_THREADS)


@pytest.mark.release
@pytest.mark.parametrize(("jit", "ranks"), [("hvd", 3), pytest.param("jax", 2, marks=pytest.mark.full)])
def test_everything_with_one_thread_and_random_delays(jit: str, ranks: int) -> None:
    run_on(ranks, MODULES, run_delayed, TEST_JIT=jit, **ONE_THREAD)


# ---- failures: all ranks get typed errors, and none waits on ------------------------------------

PROGRAM = Path(__file__).with_name("program.py")
LIMIT_S = 240.0


def outcome(
    how: str, tmp_path: Path, *more: str, ranks: int = 3, **settings: str
) -> Tuple[int, List[List[str]], str]:
    """The exit code of so many ranks, what each has written, and what the launcher printed."""
    job = Launched("-np", str(ranks), str(PROGRAM), how, str(tmp_path), *more, env=settings)
    code = job.finish(LIMIT_S)
    files = [tmp_path / f"rank.{rank}" for rank in range(ranks)]
    return code, [file.read_text().splitlines() if file.exists() else [] for file in files], job.out + job.err


@pytest.mark.cases(1)
@pytest.mark.parametrize("jit", ["jax", "hvd"])
def test_a_lost_rank_is_a_typed_error_in_programs_and_outside(tmp_path: Path, jit: str) -> None:
    code, said, output = outcome("kill", tmp_path, TEST_JIT=jit)
    assert code == 7, output
    assert said[1] == [] and len(said[0]) == 3, output
    for lines in (said[0], said[2]):
        assert all(line.startswith("PeerLostError: rank 1 ") for line in lines), said


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("how", "jit"), [("kinds", "jax"), ("shapes", "jax"), ("groups", "jax"), ("kinds", "hvd")]
)
def test_ranks_whose_programs_differ_get_an_error_that_shows_both_calls(
    tmp_path: Path, how: str, jit: str
) -> None:
    code, said, output = outcome("out_of_order", tmp_path, how, TEST_JIT=jit)
    assert code != 0 and "Rank 0 makes another call than ranks 1, 2" in output, output
    assert len({first for first, _, _ in said}) == 1, said
    first = said[0][0]
    assert first.startswith("MismatchError") and "program.py" in first, first
    shown = {"kinds": "allgather", "shapes": "(1001,)", "groups": "2 arrays: (600,), (400,)"}[how]
    assert shown in first and "allreduce(shape (1000,)" in first, first
    assert all("Error" in later for _, *more in said for later in more), said


def test_ranks_that_disagree_by_name_get_the_same_error_and_go_on(tmp_path: Path) -> None:
    code, said, output = outcome("disagree", tmp_path)
    assert code == 0, output
    assert said[0] == said[1] == said[2]
    shapes, rows, after = said[0]
    assert shapes.startswith("MismatchError") and "(1000,)" in shapes and "(1001,)" in shapes
    assert rows.startswith("MismatchError") and "(2, 3)" in rows and "(3, 3)" in rows
    assert float(after) == 1.5


@pytest.mark.release
@pytest.mark.parametrize("jit", ["jax", "hvd"])
def test_a_program_ends_after_its_steps_in_progress(tmp_path: Path, jit: str) -> None:
    code, _, output = outcome("end", tmp_path, ranks=2, TEST_JIT=jit)
    assert code == 0 and "Error" not in output, output


@pytest.mark.release
@pytest.mark.parametrize("jit", ["jax", "hvd"])
def test_ranks_leave_after_steps_in_progress_and_join_again(tmp_path: Path, jit: str) -> None:
    code, said, output = outcome("leave", tmp_path, ranks=2, TEST_JIT=jit)
    assert code == 0, output
    for error, result, after in said:
        assert error.startswith("NotInitializedError"), error
        assert abs(float(result) - 1.1**30) < 1e-3 and float(after) == 1.5


# ---- jax.distributed.initialize() without arguments, beside ringcomm's collectives ---------------


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
