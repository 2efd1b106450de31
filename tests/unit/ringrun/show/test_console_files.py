from __future__ import annotations

import re
from pathlib import Path

import pytest

from ringcomm.errors import ConfigError
from ringrun.show.console import OutputFiles


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_files_of_ranks_that_come_and_go_are_closed(tmp_path: Path) -> None:
    files = OutputFiles(tmp_path, 1)
    before = descriptors()
    for rank in range(1, 20):
        files.add(rank)
        files.write(rank, 1, b"a line\n")
        files.remove(rank)
    assert descriptors() == before
    files.write(5, 1, b"late\n")
    assert (tmp_path / "rank.5" / "stdout").read_text() == "a line\n"
    files.close()


def test_a_link_in_the_place_of_a_ranks_folder_is_not_followed(tmp_path: Path) -> None:
    """The folder is opened once, and what is below it by that descriptor."""
    (tmp_path / "other").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "rank.0").symlink_to(tmp_path / "other")
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path}/out/rank.0 cannot be written")):
        OutputFiles(tmp_path / "out", 1)
    assert list((tmp_path / "other").iterdir()) == []
