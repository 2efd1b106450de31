"""``ringrun.run()`` without a job: its arguments, what workers are sent, and what becomes of an outcome."""

from __future__ import annotations

import functools
import json
import sys
import types
from typing import Any, Dict, Optional

import cloudpickle
import pytest

from ringcomm.calls.objects import pack_error, pack_value
from ringcomm.errors import ConfigError, RemoteError
from ringrun.agent.worker import Call
from ringrun.diagnosis.first_failure import Cause
from ringrun.function import _pack, unpack_results
from ringrun.function import run as run_function
from ringrun.job.launch import prepare
from ringrun.job.outcome import Outcome
from ringrun.plan.job import Job
from ringrun.plan.options import Options


@pytest.mark.parametrize("by_value", [False, True])
@pytest.mark.parametrize("function", [json.dumps, functools.partial(json.dumps, 1)])
def test_an_installed_function_is_sent_by_its_name(function, by_value):
    packed = _pack(Call(function, (), {}), by_value)
    assert b"dumps" in packed and len(packed) < 20_000
    assert b"separators" not in packed, "its code was sent"


def test_a_function_of_a_module_that_is_not_installed_is_sent_with_its_code():
    assert b"a_text_in_its_code" in _pack(Call(of_this_module, (), {}), True)
    assert __name__ not in cloudpickle.list_registry_pickle_by_value(), "for this call only"


def of_this_module():
    return "a_text_in_its_code"


def test_a_module_that_no_new_process_can_import_is_sent_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    made = types.ModuleType("made_in_memory")
    exec("def answer():\n    return 'a_text_in_its_code'", made.__dict__)
    monkeypatch.setitem(sys.modules, "made_in_memory", made)
    assert b"a_text_in_its_code" not in _pack(Call(made.answer, (), {}), False), "it has no file"
    made.__file__ = "/gone/made_in_memory.py"
    assert b"a_text_in_its_code" in _pack(Call(made.answer, (), {}), False)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"fn": 3}, "every rank calls, not 3"),
        ({"args": 7}, "args=7: the arguments must be a list or a tuple"),
        ({"kwargs": [1]}, r"kwargs=\[1\] is not a dictionary"),
        ({"env": "A=1"}, "env='A=1' is not a dictionary"), ({"np": "2"}, "np='2' is not a whole number"),
        ({"np": True}, "np=True is not a whole number"),
        ({"restarts": -1}, "restarts=-1 is out of range: it must be at least 0"),
        ({"ssh_port": 99999}, "ssh_port=99999 is out of range: it must be from 1 to 65535"),
        ({"hosts": ["a"]}, r"hosts=\['a'\] is not a string, like \"localhost,jetson1:2\""),
        ({"python": {"a": 3}}, r"python\['a'\]=3 is not a string"),
        ({"cwd": {3: "/c"}}, "a host of cwd=3 is not a string"),
        ({"start_timeout_s": "1"}, "start_timeout_s='1' is not a number"),
        ({"settings": [1]}, r"settings=\[1\] is not a dictionary"),
        ({"settings": {"tranport": "tcp"}}, "no setting 'tranport'"),
        ({"hosts": "localhost:2", "np": 3}, "-np 3"),
    ],
)
def test_arguments_that_cannot_be_used(wrong: Dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run_function(**{"fn": print, **wrong})

# ---- the job and its outcome --------------------------------------------------------------------------


@pytest.fixture
def job() -> Job:
    return prepare(Options(np=3), ["true"], {"PATH": "/"})


def values(*ranks: int) -> Dict[int, Optional[bytes]]:
    return {rank: pack_value(f"of {rank}") for rank in ranks}


def test_results_come_in_the_sequence_of_the_ranks(job: Job) -> None:
    assert unpack_results(job, Outcome(0, "", "done", results=values(2, 0, 1))) == ["of 0", "of 1", "of 2"]
    elastic = Outcome(0, "", "done", results=values(2, 0), members=[2, 0])
    assert unpack_results(job, elastic) == ["of 2", "of 0"]


def test_a_result_that_is_not_signed_is_not_unpickled(job: Job) -> None:
    with pytest.raises(RemoteError, match="rank 1 on localhost has no valid signature") as caught:
        unpack_results(job, Outcome(0, "", "done", results={**values(0, 2), 1: None}))
    assert (caught.value.rank, caught.value.host) == (1, "localhost")


@pytest.mark.parametrize(
    ("report", "text"), [("a box", "a box"), ("", "The job was stopped before its functions returned.")]
)
def test_a_job_without_a_rank_that_failed_first(job: Job, report: str, text: str) -> None:
    with pytest.raises(RemoteError, match=text) as caught:
        unpack_results(job, Outcome(130, report, "interrupt"))
    assert caught.value.rank is None


def failed(result: Optional[bytes]) -> Outcome:
    results = values(0) if result is None else {**values(0), 2: result}
    return Outcome(1, "a box", "failure", Cause(2, None, "exit code 1", "", 1), results=results)


def test_the_exception_of_the_rank_that_failed_first_is_the_cause(job: Job) -> None:
    try:
        raise KeyError("no such thing")
    except KeyError as error:
        packed = pack_error(error)
    with pytest.raises(RemoteError, match="rank 2 on localhost: KeyError: 'no such thing'") as caught:
        unpack_results(job, failed(packed))
    assert isinstance(caught.value.__cause__, KeyError) and caught.value.rank == 2
