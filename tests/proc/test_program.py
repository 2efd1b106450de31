"""Hosts that have other versions of the same program are named when the job starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import List

from tests.proc.test_ringrun_support import LIMIT_S, SOURCES
from tests.support.service import free_port

TRAIN = "import model\nimport ringcomm as rc\nrc.init()\nrc.barrier()\nprint(rc.size())\n"


def start(tmp_path: Path, models: List[str]) -> List[str]:
    """One rank per version of ``model.py``, each in a folder of its own; what they say."""
    port = free_port()
    running = []
    for rank, model in enumerate(models):
        folder = tmp_path / f"host{rank}"
        folder.mkdir()
        (folder / "train.py").write_text(TRAIN)
        (folder / "model.py").write_text(model)
        env = {key: value for key, value in os.environ.items() if not key.startswith("RINGCOMM_")}
        env.update(
            PYTHONPATH=SOURCES, RINGCOMM_SIZE=str(len(models)), RINGCOMM_RANK=str(rank),
            RINGCOMM_KEY="ab" * 32, RINGCOMM_RENDEZVOUS=f"127.0.0.1:{port}", RINGCOMM_HOST=f"host{rank}",
        )  # fmt: skip
        running.append(
            subprocess.Popen(
                [sys.executable, "train.py"],
                cwd=folder,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )  # fmt: skip
        )
    try:
        said = [process.communicate(timeout=LIMIT_S)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * len(models), said
    return said


def test_a_warning_names_host_and_file(tmp_path: Path) -> None:
    said = start(tmp_path, ["lr = 1", "lr = 1", "lr = 2"])
    text = "".join(said)
    assert text.count("do not run the same program") == 1, text
    assert "model.py on host2 (rank 2) is not that on host0 (rank 0), host1 (rank 1)." in text
    assert "train.py on" not in text


def test_the_same_files_in_other_folders_say_nothing(tmp_path: Path) -> None:
    assert start(tmp_path, ["lr = 1", "lr = 1"]) == ["2\n", "2\n"]
