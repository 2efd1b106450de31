from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from ringcomm.clock import Deadline
from ringcomm.configuration.membership import Launched
from ringcomm.errors import ConfigError
from ringcomm.rendezvous.embedded import FileNotice

NOW = Deadline(0.0)
OTHER_USER = 12345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def notice(folder: Path, turn: int = 0, job: str = "slurm 7.0", rank: int = 1) -> FileNotice:
    return FileNotice(Launched("srun", rank, 2, job, str(folder)), turn)


def test_only_the_owner_can_read_it(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    notice(folder, rank=0).publish("text")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()] == [0o600]
    assert notice(folder).read(NOW) == "text"


@as_root
def test_what_another_user_has_put_there_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    notice(tmp_path, rank=0).publish("text")
    path = next(tmp_path.iterdir())
    path.rename(tmp_path / "other")
    path.symlink_to(tmp_path / "other")
    os.chown(path, OTHER_USER, OTHER_USER, follow_symlinks=False)
    with pytest.raises(ConfigError, match="belongs to another user"):
        notice(tmp_path).read(NOW)
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(ConfigError, match="not a regular file"):
        notice(tmp_path).read(NOW)
    path.unlink()
    (tmp_path / "other").rename(path)
    for mode in (0o600, 0o644, 0o666):
        path.chmod(mode)
        os.chown(path, OTHER_USER, OTHER_USER)
        with pytest.raises(ConfigError, match="belongs to another user"):
            notice(tmp_path).read(NOW)


def test_a_file_of_an_earlier_start_is_replaced(tmp_path: Path) -> None:
    notice(tmp_path, rank=0).publish("old")
    reader = notice(tmp_path)
    assert reader.read(NOW) == "old" and not reader.moved()
    writer = notice(tmp_path, rank=0)
    writer.publish("new")
    assert reader.moved() and reader.read(NOW) == "new" and not reader.moved()
    writer.withdraw()
    writer.withdraw()
    assert not reader.moved() and list(tmp_path.iterdir()) == []
