"""Jobs whose ranks srun or mpirun has started: they find each other by a file."""

from __future__ import annotations

import json
import socket
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, List

import pytest

from ringcomm.clock import Deadline
from ringcomm.config import Membership, Settings
from ringcomm.configuration.membership import Launched
from ringcomm.errors import StartupError
from ringcomm.rendezvous import embedded as module
from ringcomm.rendezvous.embedded import FileNotice, join_launched
from tests.support.service import eventually

SETTINGS = Settings(start_timeout_s=60.0, spin_us=0.0)


@pytest.fixture
def first_turn(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes the next start that of another process, which has not joined before."""

    def forget() -> None:
        monkeypatch.setattr(module, "_turns", 0)

    forget()
    return forget


def of(launched: Launched) -> Membership:
    return Membership(size=launched.size, rank=launched.rank, launched=launched)


def check_joined(results: List[Any]) -> None:
    """Both have joined the same job, of which rank 0 serves the rendezvous."""
    assert [(joined.rank, joined.embedded is not None) for joined in results] == [(0, True), (1, False)]
    first, second = (joined.membership for joined in results)
    assert (first.job, first.key, first.rendezvous) == (second.job, second.key, second.rendezvous)
    for joined in results:
        joined.control.leave("the test is over", True)
        joined.channels.close()
    results[0].embedded.stop()


def by_file(folder: Any, rank: int) -> Launched:
    return Launched("srun", rank, 2, "slurm 7.0", str(folder))


def test_ranks_find_each_other_by_a_file_and_leave_none(
    no_leaks: None, tmp_path: Any, first_turn: Callable[[], None]
) -> None:
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(join_launched, of(by_file(tmp_path, 1)), SETTINGS)
        assert eventually(lambda: module._turns == 1)
        first_turn()
        zero = pool.submit(join_launched, of(by_file(tmp_path, 0)), SETTINGS)
        results = [zero.result(60.0), one.result(60.0)]
    assert list(tmp_path.iterdir()) == []
    check_joined(results)


def test_a_file_that_is_left_from_an_earlier_start_is_replaced(
    no_leaks: None, tmp_path: Any, first_turn: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing answers at the address in it, and then another one is there."""
    moved, looked = FileNotice.moved, threading.Event()

    def look(notice: FileNotice) -> bool:
        looked.set()
        return moved(notice)

    monkeypatch.setattr(FileNotice, "moved", look)
    with socket.socket() as taken, ThreadPoolExecutor(2) as pool:
        taken.bind(("127.0.0.1", 0))
        old = {"job": "old", "key": "ab" * 32, "certificate": "", "machine": "", "endpoints": [
            list(taken.getsockname())
        ]}  # fmt: skip
        FileNotice(by_file(tmp_path, 0), 0).publish(json.dumps(old))
        one = pool.submit(join_launched, of(by_file(tmp_path, 1)), SETTINGS)
        assert looked.wait(30.0)
        first_turn()
        zero = pool.submit(join_launched, of(by_file(tmp_path, 0)), SETTINGS)
        check_joined([zero.result(60.0), one.result(60.0)])


TEXTS = (
    "not JSON",
    "[]",
    json.dumps({"job": "j"}),
    json.dumps({"job": "j", "key": "no hex", "certificate": "", "machine": "", "endpoints": []}),
    json.dumps({"job": "j", "key": "ab", "certificate": "", "machine": "", "endpoints": [["a", True]]}),
    json.dumps({"job": "j", "key": "ab", "certificate": "", "machine": "", "endpoints": [["a", 70000]]}),
    "[" * 100_000,
)


def test_another_text_than_rank_0_publishes_is_an_error(
    no_leaks: None, tmp_path: Any, first_turn: Callable[[], None]
) -> None:
    for text in TEXTS:
        first_turn()
        FileNotice(by_file(tmp_path, 0), 0).publish(text)
        words = rf"is not what rank 0 publishes .*\({len(text)} characters\)"
        with pytest.raises(StartupError, match=words):
            join_launched(of(by_file(tmp_path, 1)), SETTINGS)


# ---- the file ----------------------------------------------------------------------------------


def notice(folder: Path, turn: int = 0, job: str = "slurm 7.0", rank: int = 1) -> FileNotice:
    return FileNotice(Launched("srun", rank, 2, job, str(folder)), turn)


def test_only_the_owner_can_read_it(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    notice(folder, rank=0).publish("text")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()] == [0o600]
    assert notice(folder).read(Deadline(0.0)) == "text"
