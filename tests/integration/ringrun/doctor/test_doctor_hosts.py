"""The doctor's program on a host: how it is started, asked and ended, with programs that misbehave."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable, Iterator, List, Sequence

import pytest

from ringrun.doctor import hosts as module
from ringrun.doctor import probe
from ringrun.doctor.hosts import HostProbe
from ringrun.job.launch import prepare
from ringrun.plan.job import HostJob
from ringrun.plan.options import Options
from ringrun.reach import doors

LIMIT_S = 60.0
ANSWERS = f"printf '\\n{probe.MARKER}\\n'; "


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take long to start a program."""
    monkeypatch.setattr(module, "START_LIMIT_S", LIMIT_S)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Callable[..., HostJob]:
    """`host(program)`: a host on which a shell program runs in place of the doctor's."""
    monkeypatch.setattr(doors, "find_local", lambda specs, **_: [False] * len(specs))

    def make(program: str = "", name: str = "a", fallback: Sequence[str] = ()) -> HostJob:
        (made,) = prepare(Options(hosts=name, via="env TEST_HOST={host}", ship_self=False), ["true"]).hosts
        if program:
            made = replace(made, argv=("sh", "-c", program))
        return replace(made, fallback=tuple(fallback))

    return make


@pytest.fixture
def start() -> Iterator[Callable[[HostJob], HostProbe]]:
    started: List[HostProbe] = []

    def begin(item: HostJob) -> HostProbe:
        started.append(HostProbe(item))
        started[-1].start()
        return started[-1]

    yield begin
    for found in started:
        found.end()


def test_the_program_answers_until_it_is_ended(
    host: Any, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "END_S", LIMIT_S)
    found = start(host())
    assert found.problem == "" and found.noise == "" and found.start_s > 0.0
    assert found.ask(LIMIT_S, do="facts", cwd="/")["python"]
    found.end()
    assert found._process.returncode == 0
    assert found.ask(LIMIT_S, do="facts", cwd="/") is None
    assert found.problem == "a: it stopped answering (facts)."


def test_a_host_that_was_not_started_has_nothing_to_end(host: Any) -> None:
    found = HostProbe(host())
    found.end()
    assert found.ask(LIMIT_S, do="facts", cwd="/") is None and found.problem == ""


def test_another_interpreter_is_tried_if_there_is_none(host: Any, start: Any) -> None:
    real = host().argv
    found = start(host("exit 127", fallback=real))
    assert found.problem == "" and found.ask(LIMIT_S, do="facts", cwd="/") is not None
    missing = start(replace(host(fallback=real), argv=("/no/such/program",)))
    assert missing.problem == ""


def test_what_the_first_command_printed_is_no_part_of_the_second_ones_output(host: Any, start: Any) -> None:
    answers = ("sh", "-c", f"printf '{probe.MARKER}\\n'; exec cat >/dev/null")
    found = start(host("printf unfinished; exit 127", fallback=answers))
    assert found.problem == "" and found.noise == ""


def test_why_a_host_does_not_answer(host: Any, start: Any) -> None:
    assert "/no/such/program cannot be started: No such file" in start(
        replace(host(), argv=("/no/such/program",))
    ).problem
    found = start(host("echo access is denied >&2; exit 9", fallback=host().argv))
    assert "ended with status 9" in found.problem and "access is denied" in found.problem
    assert start(host("exec >&-; exit 127")).problem


def test_a_program_that_closes_its_output_and_stays(
    host: Any, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "END_S", 0.1)
    found = start(host("exec >&-; exec sleep 1000"))
    assert found.problem.startswith("a: ") and found._process.returncode == -9


def test_a_host_that_does_not_answer_in_time(host: Any, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "START_LIMIT_S", 0.1)
    monkeypatch.setattr(module, "END_S", LIMIT_S)
    found = start(host("cat >/dev/null; exit 0"))
    assert found.problem == "a: no answer within 0.1 s of the login." and found._process.returncode == 0


def test_what_the_login_prints_is_kept_apart(host: Any, start: Any) -> None:
    program = 'echo Welcome; echo; echo to a; exec "$@"'
    found = start(replace(host(), argv=("sh", "-c", program, "login", *host().argv)))
    assert found.problem == "" and found.noise == "Welcome\nto a"
    assert found.ask(LIMIT_S, do="facts", cwd="/") is not None


@pytest.mark.parametrize("program", ["while :; do echo 7; done", "exec cat /dev/zero"], ids=["lines", "line"])
def test_a_host_that_prints_without_end(
    host: Any, start: Any, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setattr(module, "NOISE_LIMIT_BYTES", 10_000)
    found = start(host(program))
    assert found.problem == "a: more than 10000 bytes of output before the program's first line."
    assert found.ask(LIMIT_S, do="facts", cwd="/") is None


@pytest.mark.parametrize("answer", ["exit 0", "echo no JSON; exec cat", "exec sleep 1000"])
def test_answers_that_are_none(host: Any, start: Any, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    monkeypatch.setattr(module, "END_S", 0.1)
    found = start(host(f"{ANSWERS} read line; {answer}"))
    limit_s = 0.1 if "sleep" in answer else LIMIT_S
    assert found.ask(limit_s, do="facts") is None
    assert found.problem == "a: it stopped answering (facts)."
