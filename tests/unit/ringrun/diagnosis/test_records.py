"""Flight records as the launcher keeps, writes and reads them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Dict, List

import pytest

from ringcomm.errors import ConfigError
from ringrun.agent.shipped import RECORDS
from ringrun.diagnosis.first_failure import Complaint, Exit
from ringrun.diagnosis.records import (
    KEPT_FOLDERS,
    Records,
    diagnose_folder,
    explain,
    has_operations,
    keep_records,
)
from ringrun.job.launch import prepare
from ringrun.plan.options import Options

LOST = "rank 1 was lost"


def record(reason: str = "asked", generation: int = 0, **more: Any) -> bytes:
    channels = [{"name": "calls", "ordered": True, "members": [0, 1], "operations": []}]
    content: Dict[str, Any] = {"type": "record", "format": 1, "reason": reason, "lanes": channels}
    return json.dumps({**content, "generation": generation, "threads": [], **more}).encode()


@pytest.fixture
def records() -> Records:
    return Records(prepare(Options(np=2), ["true"]))


FAILED = object()
"""The job has failed, and ranks are asked."""
MISMATCH = {"error": "MismatchError: The ranks do not make the same call."}
VICTIM = {"error": f"PeerLostError: {LOST}", "culprit": 1, "because": LOST}


@pytest.mark.parametrize(
    ("came", "counts"),
    [
        # The newest counts, but not what follows a failure; another generation begins anew.
        (["asked", "asked"], 2), (["asked", "failure", "asked", "silent"], 2),
        (["failure", ("asked", {"generation": 1})], 2),
        # After the failure the first counts: where a rank was then, and not that it has come since.
        (["asked", FAILED, "asked", "failure"], 3), (["asked", FAILED, "silent", "failure"], 3),
        (["asked", FAILED, "failure", "failure"], 3),
        # Ranks find a mismatch together: which of them is asked before it has told so is a matter of time.
        ([FAILED, "asked", ("failure", MISMATCH), "asked"], 3),
        ([FAILED, "silent", ("failure", MISMATCH)], 3),
        ([FAILED, "asked", ("failure", {**MISMATCH, "culprit": 1})], 2),
        # A rank on a busy machine gives its account of another's failure after the time for an answer.
        ([FAILED, "silent", ("failure", VICTIM), "silent"], 3),
        # What was told of a failure stays, and that a program has ended, unless it failed while it ended.
        (["failure", FAILED, "asked"], 1), (["silent", "ended", "silent", FAILED, "silent"], 2),
        (["ended", "failure", "ended"], 2),
    ],
)  # fmt: skip
def test_which_record_of_a_rank_counts(records: Records, came: List[Any], counts: int) -> None:
    for number, item in enumerate(came, 1):
        if item is FAILED:
            records.forget(failed=True)
        else:
            reason, more = item if isinstance(item, tuple) else (item, {})
            assert records.take(0, record(reason, pid=number, **more)) == reason
    assert records.complete({})[0]["pid"] == counts


def test_a_rank_that_fails_by_itself_before_its_first_call_has_failed(records: Records) -> None:
    records.forget(failed=True)
    assert records.take(0, record("silent", state="starved")) == "starved"
    records.take(0, record("failure", error="uncaught KeyError: 'x'"))
    assert "Rank 0 (localhost) ended with an uncaught KeyError: 'x'." in explain(records.complete({}))


def test_records_that_stay_when_ranks_are_asked_again(records: Records) -> None:
    records.take(0, record("failure"))
    records.take(1, record("asked"))
    records.forget(failed=True)
    assert records.answered() == 1
    records.forget()
    assert records.answered() == 0
    records.take(0, record("ended", left="its program ended"))
    records.forget()
    assert records.answered() == 1 and records.answered({0: Exit(0, 0, None)}) == 0
    contents = records.complete({0: Exit(0, 0, None)})
    assert contents[0]["reason"] == "ended" and contents[0]["end"] == "exit code 0"
    assert "Rank 0 (localhost) has ended with exit code 0." in explain(contents)


def test_a_rank_that_reports_another_as_the_cause(records: Records) -> None:
    records.take(0, record("failure", culprit=1, because=LOST, error=f"PeerLostError: {LOST}"))
    records.take(1, record("failure", culprit=None, error="uncaught ValueError: x"))
    told = Complaint(0, 1, "rank 1 was lost")
    assert [records.is_victim(rank) for rank in range(2)] == [True, False]
    lost = "ringcomm.errors.PeerLostError: rank 1 was lost"
    assert records.explanations({0: ["…", lost], 1: ["x"]}) == [told]
    assert records.explanations({0: ["RuntimeError: rank 1 was lost"]}) == [told], "as PyTorch may put it"
    assert records.explanations({0: ["ValueError: another matter, later"]}) == []


ROW = {
    "op": 1, "kind": "barrier", "name": "", "what": "barrier", "site": "a.py:1", "state": "done", "at": 1.0,
}
CHANNELS = [{"name": "c", "ordered": True, "members": [0, 1], "operations": [ROW]}]


def test_ranks_that_end_without_any_call(records: Records) -> None:
    for rank in (0, 1):
        assert not records.made_no_call()
        records.take(rank, record("ended"))
    assert records.made_no_call()
    records.take(1, record("ended", generation=1, lanes=CHANNELS))
    assert not records.made_no_call() and not has_operations(records.complete({})), "all have ended"
    records.take(1, record("asked", generation=2, lanes=CHANNELS))
    assert has_operations(records.complete({}))


def test_what_is_written_is_read_again(records: Records, tmp_path: Path) -> None:
    records.take(1, record())
    contents = records.complete({0: Exit(0, None, 9)})
    folder = tmp_path / "new" / "folder"
    job = prepare(Options(np=2, output_dir=str(folder)), ["true"])
    folder.parent.mkdir()
    for earlier in ({7: {}}, contents):
        assert keep_records(job, earlier) == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in folder.iterdir()) == ["flight.0.json", "flight.1.json"]
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert diagnose_folder(folder) == (explain(contents) + "\n", 0)
    for other, text in ((tmp_path / "none", "is not a directory"), (tmp_path, "has no flight records")):
        with pytest.raises(ConfigError, match=text):
            diagnose_folder(other)


def test_the_newest_folders_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringrun.diagnosis.records.tempfile.gettempdir", lambda: str(tmp_path))
    job = prepare(Options(np=2), ["true"])
    (tmp_path / f"{RECORDS}file").touch()
    (tmp_path / f"{RECORDS}link").symlink_to("/")
    (tmp_path / "other").mkdir()
    made = []
    for number in range(KEPT_FOLDERS + 3):
        made.append(keep_records(job, {0: {}}))
        os.utime(made[-1], (number, number))
    last = keep_records(job, {0: {}})
    assert [folder.exists() for folder in made] == [False] * 4 + [True] * (KEPT_FOLDERS - 1)
    others = {path.name for path in tmp_path.iterdir()} - {path.name for path in [*made, last]}
    assert others == {f"{RECORDS}file", f"{RECORDS}link", "other"}


BAD_CHANNEL = {"name": "calls", "ordered": True, "members": [0, 1], "operations": [{
    "op": 1, "kind": "allreduce", "name": "x", "what": "y", "site": "t.py:1", "state": "running",
}]}  # fmt: skip


@pytest.mark.parametrize(
    "said",
    [
        b'{"type": "record", "format": 1, "reason": "asked", "rank": Infinity, "host": "h"}',
        record(generation=float("nan")),  # type: ignore[arg-type]
        record(culprit=1e999),
        record(rank=0, host="h", culprit=0).replace(b'"culprit": 0', b'"culprit": 1e999'),
        record(generation="newest"),  # type: ignore[arg-type]
        record(
            lanes=[{**BAD_CHANNEL, "operations": [{**BAD_CHANNEL["operations"][0], "at": 1}], "members": 7}]
        ),
        record(lanes=[BAD_CHANNEL]).replace(b'"op": 1', b'"op": 1, "at": 1e999'),
        record(lanes=7), record(threads=7), record(threads=[7]), record(threads=[{}]), record(format=2),
        record(threads=[{"main": True, "frames": [["x", "y", "z"]]}]), record(lanes=[{"sets": 3}]),
        b"[" * 100_000, b"7", b"null", b"[]", b"{}", b"", b"\xff", b'{"rank": 0', record(lanes=[{}]),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_left_out_with_a_sentence(
    records: Records, tmp_path: Path, said: bytes
) -> None:
    assert records.take(0, record("asked", generation=0)) == "asked"
    assert records.take(0, said) == "" == records.take(7, record())
    assert records.take(0, record("asked", generation=1)) == "asked" and records.answered() == 1
    (tmp_path / "flight.0.json").write_bytes(said)
    text, code = diagnose_folder(tmp_path)
    assert code == 1 and text.startswith(f"{tmp_path}/flight.0.json cannot be read: ")
    assert len(text.splitlines()) == 1
