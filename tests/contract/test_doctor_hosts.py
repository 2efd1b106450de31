"""The doctor's program on a host: how it is started, asked and ended, with programs that misbehave."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Callable, Dict, Iterator, List, Sequence, Set, Tuple

import pytest

from ringrun.doctor import hosts as module
from ringrun.doctor import probe
from ringrun.doctor.hosts import LEAST_STREAM_S, STREAM_S, STREAMS_S, HostProbe, examine, rounds, stream_s
from ringrun.job.launch import Options, prepare
from ringrun.plan.job import HostJob
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
    assert found.problem == "a: more than 10000 bytes of output before the doctor's first line."
    assert found.ask(LIMIT_S, do="facts", cwd="/") is None


@pytest.mark.parametrize("answer", ["exit 0", "echo no JSON; exec cat", "exec sleep 1000"])
def test_answers_that_are_none(host: Any, start: Any, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    monkeypatch.setattr(module, "END_S", 0.1)
    found = start(host(f"{ANSWERS} read line; {answer}"))
    limit_s = 0.1 if "sleep" in answer else LIMIT_S
    assert found.ask(limit_s, do="facts") is None
    assert found.problem == "a: it stopped answering (facts)."


# ---- examinations -------------------------------------------------------------------------------------


@pytest.mark.full
def test_hosts_dial_each_other_and_measure(host: Any) -> None:
    steps: List[str] = []
    items = [replace(host(name=name), index=index) for index, name in enumerate("ab")]
    bad = replace(host("exit 1", name="bad"), index=2)
    found = examine([*items, bad], steps.append)
    assert len(steps) == 4 and steps[0] == "logging in" and "measuring" in steps[-1]
    assert found.hosts == ["a", "b", "bad"] and found.slots == [1, 1, 1]
    assert [bool(problem) for problem in found.problems] == [False, False, True]
    assert [facts is not None for facts in found.facts] == [True, True, False]
    pairs = {(row.source, row.target) for row in found.dialled}
    assert pairs == {(0, 1), (1, 0)} and set(found.speeds) <= pairs


class Probe:
    """In place of a host's program: answers from a table.

    Attributes:
        asked: the commands.
    """

    def __init__(self, answers: Dict[str, Any]) -> None:
        self._answers = answers
        self.asked: List[Dict[str, Any]] = []

    def ask(self, **command: Any) -> Any:
        self.asked.append(command)
        return self._answers[command["do"]]


def test_the_nearest_address_is_measured(host: Any) -> None:
    addresses = [["10.0.0.1", 24], ["10.0.0.2", 24]]
    interface = {"name": "eth0", "mtu": 1500, "virtual": False, "addresses": addresses}
    facts = {"interfaces": [interface]}
    at = {"ports": [7, 8, 9], "datagram_port": 6}
    reached = [
        {"answered": 1, "rtt_ms": [1.0, 2.0, 9.0]},
        {"answered": 1, "rtt_ms": [0.5, 0.6, 30.0]},
    ]
    first = Probe({"listen": at, "dial": reached, "stream": {"bytes_per_s": 1e9}})
    second = Probe({"listen": at, "dial": None, "stream": None})
    third = Probe({"listen": None})
    probes: Any = [first, second, third]
    with ThreadPoolExecutor(3) as pool:
        dialled, targets = module._dial(pool, probes, [facts, facts, None])
        speeds = module._measure(pool, probes, dialled, targets)
    assert [row.result for row in dialled] == [*reached, {"error": "timeout"}, {"error": "timeout"}]
    assert sorted(targets) == [0, 1] and targets[1][0] == {
        "host": 1, "iface": "eth0", "address": "10.0.0.1", "mtu": 1500, "port": 7, "datagram_port": 6,
        "virtual": False,
    }  # fmt: skip
    (stream,) = [command for command in first.asked if command["do"] == "stream"]
    assert stream["target"]["address"] == "10.0.0.2", "half of its trips took less than 0.6 ms"
    assert speeds == {(0, 1): 1e9}
    second_only = [module.Dialled(1, 0, "10.0.0.1", "eth0", {"answered": 0, "rtt_ms": [1.0]})]
    with ThreadPoolExecutor(3) as pool:
        assert module._measure(pool, probes, second_only, targets) == {(1, 0): None}


@pytest.mark.parametrize(
    ("count", "seconds"), [(0, STREAM_S), (2, STREAM_S), (20, STREAMS_S / 20), (1000, LEAST_STREAM_S)]
)
def test_all_streams_together_take_a_few_seconds(count: int, seconds: float) -> None:
    assert stream_s(count) == pytest.approx(seconds)


@pytest.mark.parametrize("count", range(9))
def test_in_a_round_no_host_occurs_twice(count: int) -> None:
    seen: Set[Tuple[int, int]] = set()
    for pairs in rounds(count):
        used = [host for pair in pairs for host in pair]
        assert len(used) == len(set(used)) and not seen.intersection(pairs)
        seen.update(pairs)
    assert seen == {(a, b) for a in range(count) for b in range(count) if a != b}
