"""The key-value store of MPICH's mpirun, and jobs that find each other by it or by a file."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Dict, Iterator, List

import pytest

from ringcomm.clock import Deadline
from ringcomm.config import Membership, Settings
from ringcomm.configuration.other_launchers import Launched
from ringcomm.errors import StartTimeoutError, StartupError
from ringcomm.rendezvous import launched as module
from ringcomm.rendezvous import pmi as pmi_module
from ringcomm.rendezvous.launched import FileNotice, PmiNotice, join_launched
from ringcomm.rendezvous.pmi import LINE_BYTES, MAX_PIECES, PIECE, Pmi
from tests.support.service import eventually

SETTINGS = Settings(start_timeout_s=60.0, spin_us=0.0)


def soon() -> Deadline:
    return Deadline(30.0)


class Mpirun:
    """Keeps a store for some processes, each at the other end of a connection, as mpirun does.

    Attributes:
        lines: what the processes have sent, in the order of arrival.
        store: what they have stored.
        answers: what to answer to a command in place of what mpirun does.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.lines: List[str] = []
        self.store: Dict[str, str] = {}
        self.answers: Dict[str, bytes] = {}
        self.ends: List[socket.socket] = []
        self._lock = threading.Lock()
        self._inside: List[socket.socket] = []
        self._threads: List[threading.Thread] = []

    def connect(self) -> int:
        """The descriptor of one more process."""
        here, there = socket.socketpair()
        self.ends += [here, there]
        self._threads.append(threading.Thread(target=self._serve, args=(here,)))
        self._threads[-1].start()
        return there.fileno()

    def _serve(self, sock: socket.socket) -> None:
        with sock.makefile("rb") as lines, contextlib.suppress(OSError):  # the test has closed an end
            for line in lines:
                with self._lock:
                    self._answer(sock, line.decode().strip())

    def _answer(self, sock: socket.socket, line: str) -> None:
        self.lines.append(line)
        words = dict(word.partition("=")[::2] for word in line.split())
        command = words["cmd"]
        if command in self.answers:
            sock.sendall(self.answers[command])
        elif command == "init":
            sock.sendall(b"cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0\n")
        elif command == "get_my_kvsname":
            sock.sendall(b"cmd=my_kvsname kvsname=kvs_1\n")
        elif command == "put":
            self.store[words["key"]] = words["value"]
            sock.sendall(b"cmd=put_result rc=0 msg=success\n")
        elif command == "get":
            found = self.store.get(words["key"])
            rest = f"rc=0 msg=success value={found}" if found is not None else "rc=-1 msg=key_not_found"
            sock.sendall(f"cmd=get_result {rest}\n".encode())
        elif command == "barrier_in":
            self._inside.append(sock)
            if len(self._inside) == self.size:
                for item in self._inside:
                    item.sendall(b"cmd=barrier_out rc=0\n")
                self._inside.clear()
        elif command == "finalize":
            sock.sendall(b"cmd=finalize_ack rc=0\n")

    def close(self) -> None:
        """End all connections."""
        for sock in self.ends:
            with contextlib.suppress(OSError):  # the test has closed its end
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(30.0)
        for sock in self.ends:
            sock.close()


@pytest.fixture
def at_exit(monkeypatch: pytest.MonkeyPatch) -> List[Callable[[], None]]:
    """Return what would be called when this process ends."""
    registered: List[Callable[[], None]] = []
    monkeypatch.setattr(pmi_module.atexit, "register", registered.append)
    return registered


@pytest.fixture
def mpirun(no_leaks: None, at_exit: Any) -> Iterator[Callable[[int], Mpirun]]:
    made: List[Mpirun] = []

    def make(size: int = 1) -> Mpirun:
        made.append(Mpirun(size))
        return made[-1]

    yield make
    for item in made:
        item.close()


# ---- the store -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", "short", "Grüße, and more " * 100], ids=["empty", "short", "long"]
)
def test_a_text_of_any_length_is_stored_in_pieces(mpirun: Any, text: str) -> None:
    kept = mpirun(2)
    one, other = (Pmi(kept.connect(), soon()) for _ in range(2))
    one.put("ringcomm-0", text, soon())
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda item: item.barrier(soon()), (one, other)))
    assert other.get("ringcomm-0", soon()) == text
    assert all(len(value) <= PIECE for value in kept.store.values())
    pieces = -(-len(text.encode().hex()) // PIECE)
    assert sorted(kept.store) == sorted(f"ringcomm-0-{number}" for number in range(pieces + 1))
    assert kept.lines[0] == "cmd=init pmi_version=1 pmi_subversion=1"


def test_a_key_that_no_rank_has_stored_is_an_error(mpirun: Any) -> None:
    pmi = Pmi(mpirun().connect(), soon())
    with pytest.raises(StartupError, match="mpirun has answered 'cmd=get_result rc=-1.* to 'cmd=get'"):
        pmi.get("ringcomm-0", soon())


@pytest.mark.parametrize(
    "entries",
    [
        {"k-0": "many"},
        {"k-0": f"{MAX_PIECES + 1:x}"},
        {"k-0": "-1"},
        {"k-0": "1", "k-1": "no hex digits"},
        {"k-0": "1", "k-1": "ff"},
    ],
    ids=["no number", "too many pieces", "negative", "no bytes", "no text"],
)
def test_an_entry_that_ringcomm_has_not_stored_is_an_error(mpirun: Any, entries: Dict[str, str]) -> None:
    kept = mpirun()
    pmi = Pmi(kept.connect(), soon())
    kept.store.update(entries)
    with pytest.raises(StartupError, match="The entry 'k' of mpirun's key-value store is not valid"):
        pmi.get("k", soon())


ANSWERS = (
    (b"cmd=response_to_init rc=-1\n", "mpirun has answered 'cmd=response_to_init rc=-1' to 'cmd=init'"),
    (b"\n", "mpirun has answered '' to 'cmd=init'"),
    (b"x" * (LINE_BYTES + 1), f"a line of more than {LINE_BYTES} bytes"),
)


def test_a_program_that_does_not_follow_the_protocol_is_an_error(mpirun: Any, at_exit: Any) -> None:
    for answer, words in ANSWERS:
        kept = mpirun()
        kept.answers["init"] = answer
        with pytest.raises(StartupError, match=words):
            Pmi(kept.connect(), soon())
    assert at_exit == [], "what has not begun need not be finalized"


def test_an_mpirun_that_ends_is_an_error(mpirun: Any) -> None:
    kept = mpirun()
    pmi = Pmi(kept.connect(), soon())
    kept.ends[0].shutdown(socket.SHUT_WR)
    with pytest.raises(StartupError, match=r"closed its connection to this process \(PMI_FD\)"):
        pmi.get("k", soon())
    kept.ends[0].shutdown(socket.SHUT_RD)
    with pytest.raises(StartupError, match="mpirun's descriptor PMI_FD=.* fails"):
        pmi.get("k", soon())


def test_a_barrier_that_others_do_not_reach_ends_in_time(mpirun: Any) -> None:
    pmi = Pmi(mpirun(2).connect(), soon())
    with pytest.raises(StartTimeoutError, match=r"in time \(RINGCOMM_START_TIMEOUT\)"):
        pmi.barrier(Deadline(0.05))


def test_a_process_finalizes_at_its_end_and_its_forks_do_not(
    mpirun: Any, at_exit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = mpirun()
    pmi = Pmi(kept.connect(), soon())
    (finalize,) = at_exit
    with monkeypatch.context() as forked:
        forked.setattr(pmi_module.os, "getpid", lambda: pmi._pid + 1)
        finalize()
    assert "cmd=finalize" not in kept.lines
    finalize()
    assert kept.lines[-1] == "cmd=finalize"
    kept.ends[0].shutdown(socket.SHUT_RDWR)
    finalize()  # MPI_Finalize has done it before, and mpirun has closed the connection


# ---- whole starts ----------------------------------------------------------------------------


@pytest.fixture
def first_turn(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes the next start that of another process, which has not joined before."""

    def forget() -> None:
        monkeypatch.setattr(module, "_turns", 0)
        monkeypatch.setattr(module, "_pmi", None)

    forget()
    return forget


def of(launched: Launched) -> Membership:
    return Membership(size=launched.size, rank=launched.rank, launched=launched)


def check_joined(results: List[Any]) -> None:
    """Both have joined the same job, of which rank 0 serves the rendezvous."""
    assert [joined.rank for joined, _, _ in results] == [0, 1]
    served = [embedded is not None for _, embedded, _ in results]
    assert served == [True, False]
    first, second = (full for _, _, full in results)
    assert (first.job, first.key, first.rendezvous) == (second.job, second.key, second.rendezvous)
    for joined, _, _ in results:
        joined.control.leave("the test is over", True)
        joined.channels.close()
    results[0][1].stop()


def test_ranks_find_each_other_by_mpiruns_store(mpirun: Any, first_turn: Callable[[], None]) -> None:
    kept = mpirun(2)
    ranks = [of(Launched("mpirun (MPICH)", rank, 2, "mpich", pmi=kept.connect())) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        zero = pool.submit(join_launched, ranks[0], SETTINGS)
        assert eventually(lambda: "cmd=barrier_in" in kept.lines)
        first_turn()
        one = pool.submit(join_launched, ranks[1], SETTINGS)
        check_joined([zero.result(60.0), one.result(60.0)])


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
        FileNotice(by_file(tmp_path, 0), 0).publish(json.dumps(old), soon())
        one = pool.submit(join_launched, of(by_file(tmp_path, 1)), SETTINGS)
        assert looked.wait(30.0)
        first_turn()
        zero = pool.submit(join_launched, of(by_file(tmp_path, 0)), SETTINGS)
        check_joined([zero.result(60.0), one.result(60.0)])


def test_a_start_that_fails_at_rank_0_leaves_neither_file_nor_rendezvous(
    no_leaks: None, tmp_path: Any, first_turn: Callable[[], None]
) -> None:
    settings = Settings(start_timeout_s=0.3, spin_us=0.0)
    with pytest.raises(StartTimeoutError, match="Only 1 of 2 ranks"):
        join_launched(of(by_file(tmp_path, 0)), settings)
    assert list(tmp_path.iterdir()) == []


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
        FileNotice(by_file(tmp_path, 0), 0).publish(text, soon())
        words = rf"is not what rank 0 publishes .*\({len(text)} characters\)"
        with pytest.raises(StartupError, match=words):
            join_launched(of(by_file(tmp_path, 1)), SETTINGS)


def test_an_entry_of_mpiruns_store_never_changes(mpirun: Any, first_turn: Callable[[], None]) -> None:
    launched = Launched("mpirun (MPICH)", 0, 1, "mpich", pmi=mpirun().connect())
    notice = PmiNotice(launched, 3, soon())
    notice.publish("where it is", soon())
    assert notice.place == "the entry ringcomm-3 of mpirun's key-value store"
    notice.withdraw()  # the store ends with the job
    assert not notice.moved() and PmiNotice(launched, 3, soon()).read(soon()) == "where it is"
