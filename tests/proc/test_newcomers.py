"""New processes of an elastic job do not hold the others up before their state is ready."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.proc.test_ringrun_support import ROOT, ringrun

PROGRAM = str(ROOT / "tests" / "proc" / "programs" / "elastic_newcomer.py")


def test_the_others_go_on_while_a_new_process_reads_its_data(tmp_path: Path) -> None:
    done = ringrun("-np", "3", "--min-np", "2", PROGRAM, str(tmp_path))
    assert done.process.returncode == 0, done.err
    assert "new: rank 2 of 3\n" in done.out and done.out.count("done\n") == 3, done.out
    assert "rank 0 of 2 from step 2" in done.out, done.out


@pytest.mark.release
def test_too_few_ranks_wait_for_it(tmp_path: Path) -> None:
    """Below --min-np no step is made, so here the new process may not wait for any."""
    program = tmp_path / "train.py"
    program.write_text(Path(PROGRAM).read_text().replace("WANTED = 50", "WANTED = 0"))
    done = ringrun("-np", "3", "--min-np", "3", str(program), str(tmp_path))
    assert done.process.returncode == 0, done.err
    assert done.out.count("done\n") == 3 and "of 2 from" not in done.out, done.out
