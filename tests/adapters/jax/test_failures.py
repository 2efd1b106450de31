"""Ranks that are lost, disagree or end in JAX programs: all ranks get typed errors, and none waits on."""

from __future__ import annotations

from pathlib import Path
from typing import List, Tuple

import pytest

pytest.importorskip("jax")

from tests.proc.test_ringrun_support import Launched  # noqa: E402

PROGRAM = Path(__file__).with_name("program.py")
LIMIT_S = 240.0


def run(
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
    code, said, output = run("kill", tmp_path, TEST_JIT=jit)
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
    code, said, output = run("out_of_order", tmp_path, how, TEST_JIT=jit)
    assert code != 0 and "Rank 0 makes another call than ranks 1, 2" in output, output
    assert len({first for first, _, _ in said}) == 1, said
    first = said[0][0]
    assert first.startswith("MismatchError") and "program.py" in first, first
    shown = {"kinds": "allgather", "shapes": "(1001,)", "groups": "2 arrays: (600,), (400,)"}[how]
    assert shown in first and "allreduce(shape (1000,)" in first, first
    assert all("Error" in later for _, *more in said for later in more), said


def test_ranks_that_disagree_by_name_get_the_same_error_and_go_on(tmp_path: Path) -> None:
    code, said, output = run("disagree", tmp_path)
    assert code == 0, output
    assert said[0] == said[1] == said[2]
    shapes, rows, after = said[0]
    assert shapes.startswith("MismatchError") and "(1000,)" in shapes and "(1001,)" in shapes
    assert rows.startswith("MismatchError") and "(2, 3)" in rows and "(3, 3)" in rows
    assert float(after) == 1.5


@pytest.mark.release
@pytest.mark.parametrize("jit", ["jax", "hvd"])
def test_a_program_ends_after_its_steps_in_progress(tmp_path: Path, jit: str) -> None:
    code, _, output = run("end", tmp_path, ranks=2, TEST_JIT=jit)
    assert code == 0 and "Error" not in output, output


@pytest.mark.release
@pytest.mark.parametrize("jit", ["jax", "hvd"])
def test_ranks_leave_after_steps_in_progress_and_join_again(tmp_path: Path, jit: str) -> None:
    code, said, output = run("leave", tmp_path, ranks=2, TEST_JIT=jit)
    assert code == 0, output
    for error, result, after in said:
        assert error.startswith("NotInitializedError"), error
        assert abs(float(result) - 1.1**30) < 1e-3 and float(after) == 1.5


def test_an_exception_of_one_rank_is_reported_to_the_others(tmp_path: Path) -> None:
    code, said, output = run("fail", tmp_path)
    assert code == 1, output
    assert "bad sample" in said[0][0] and said[0][0].startswith("PeerLostError"), said
    assert said[0] == said[2]
