"""`rc.run` in cells of a real kernel: output, progress bars, results and errors."""

from __future__ import annotations

import re
from typing import Any, Dict, List

import pytest

from tests.adapters.clusters.programs_run import facts_of

pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

pytestmark = pytest.mark.release


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> List[List[Dict[str, Any]]]:
    """The outputs of cells that define a function, run it, and run it so that it fails."""
    found = facts_of("notebook_job.py", tmp_path_factory.mktemp("notebook"))
    return list(found["cells"])


def text_of(outputs: List[Dict[str, Any]], name: str) -> str:
    return "".join(item["text"] for item in outputs if item.get("name") == name)


def test_output_progress_and_results_are_below_the_cell(cells: List[List[Dict[str, Any]]]) -> None:
    out, err = text_of(cells[1], "stdout"), text_of(cells[1], "stderr")
    for rank in range(2):
        for word in ("begins", "ends"):
            assert f"[localhost:{rank}] rank {rank} {word}\n" in out
    (result,) = [item for item in cells[1] if item["output_type"] == "execute_result"]
    assert result["data"]["text/plain"] == "[200, 201]"
    assert re.search(r"\[localhost:0\] step \d+/200", err), err
    assert err.count("step 200/200\n") == 1 and err.count("\n") < 10, err
    assert "\x1b" not in out + err


def test_an_error_of_a_rank_is_the_cells_error(cells: List[List[Dict[str, Any]]]) -> None:
    (error,) = [item for item in cells[2] if item["output_type"] == "error"]
    assert error["ename"] == "RemoteError" and "no such sample" in error["evalue"]
