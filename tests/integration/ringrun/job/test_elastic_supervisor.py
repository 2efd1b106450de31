"""The supervisor of an elastic job, in this process: programs of a shell, and a rendezvous of the test."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any, Callable, List, Sequence

import pytest

from ringcomm.config import Slot
from ringcomm.errors import ConfigError
from ringrun.elastic.job import ElasticJob
from ringrun.job import elastic_ranks as module
from ringrun.job import supervise
from ringrun.job.control import send_command
from ringrun.job.elastic_ranks import ElasticRanks
from ringrun.job.launch import prepare
from ringrun.job.outcome import Outcome
from ringrun.job.supervise import Supervisor
from ringrun.plan.environment import from_values
from ringrun.plan.options import Options
from tests.integration.ringrun.job.supervised import LIMIT_S, Server, Supervised, notice

WAIT = "until [ -e enough ] || [ -e left.$RINGCOMM_MEMBER ]; do sleep 0.02; done"
"""A program's end: until a test has had enough, or this process is to leave."""
STAYS = f"echo up $RINGCOMM_MEMBER; {WAIT}"


class Running(Supervised):
    """Runs an elastic job; see :class:`Supervised`."""

    def __init__(self, job: ElasticJob, folder: Path, size: int) -> None:
        self.server = Server(folder, size)
        policy = lambda made: ElasticRanks(made, job, self.server.open)  # noqa: E731
        super().__init__(job, lambda console: Supervisor(job, console, policy))

    def run(self) -> Outcome:
        outcome = super().run()
        assert self.server.events == ["start", "stop"]
        return outcome


@pytest.fixture
def folder(runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of the ranks."""
    monkeypatch.setattr(supervise, "GRACE_S", 0.1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    return tmp_path


@pytest.fixture
def job(folder: Path) -> Callable[..., Running]:
    """`job(program, hosts, size, **elastic)`: a job whose processes run a shell program."""

    def make(program: str, hosts: Any = "local:2", size: int = 2, **more: Any) -> Running:
        values = from_values({"diagnose_dir": str(folder / "records"), **more.pop("settings", {})})
        made = prepare(
            Options(
                hosts=hosts, via="env TEST_HOST={host}", ship_self=False, setting_values=values,
                **{"min_np": 1, **more},
            ),
            ["sh", "-c", program],
        )  # fmt: skip
        assert isinstance(made, ElasticJob)
        return Running(made, folder, size)

    return make


def enough(folder: Path, count: int) -> Callable[[Sequence[int]], None]:
    """End the programs after so many views."""
    views: List[Sequence[int]] = []

    def react(members: Sequence[int]) -> None:
        views.append(members)
        if len(views) == count:
            (folder / "enough").touch()

    return react


def test_a_job_without_changes(job: Callable[..., Running], folder: Path) -> None:
    running = job(STAYS, settings={"verbose": True})
    running.server.react = enough(folder, 1)
    outcome = running.run()
    assert (outcome.exit_code, outcome.reason, outcome.report) == (0, "done", "")
    assert outcome.members == [0, 1]
    assert running.server.member_places == {0: (Slot(0, 0), "local"), 1: (Slot(0, 1), "local")}
    assert sorted(running.server.exits) == [(0, "exit code 0", True), (1, "exit code 0", True)]
    assert "ringrun: 2 ranks\n" in running.console.text, "the table of links"


def test_a_process_that_fails_is_started_again(job: Callable[..., Running], folder: Path) -> None:
    running = job(f"[ $RINGCOMM_MEMBER = 0 ] && exit 3; {WAIT}", report="page.html")
    running.server.react = enough(folder, 2)
    outcome = running.run()
    assert outcome.exit_code == 0 and outcome.members == [1, 2]
    assert (0, "exit code 3", False) in running.server.exits
    assert "the ranks changed" in outcome.report and "exit code 3" in outcome.report
    page = (folder / "page.html").read_text()
    assert running.supervisor._policy.changes and "Changes of membership" in page and "Failure" not in page


def test_all_processes_fail(job: Callable[..., Running]) -> None:
    running = job("echo broken >&2; exit 4")

    def react(members: Sequence[int]) -> None:
        running.server.size = 99  # those that are started again do not join

    running.server.react = react
    outcome = running.run()
    assert (outcome.exit_code, outcome.reason) == (4, "failure")
    assert "one or more processes exited with non-zero status" in outcome.report
    assert "broken" in outcome.report and outcome.members == []


def test_hosts_are_added_by_the_name_of_a_list_and_dropped(
    job: Callable[..., Running], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    lists = folder / "ringcomm" / "hosts"
    lists.mkdir(parents=True, mode=0o700)
    (lists / "lab").write_text(f"other slots=2 python={sys.executable}\n")
    running = job(STAYS, hosts="local:1", size=1, slots_per_host=1)
    runtime = Path(running.supervisor._control._path).parent
    answers: List[str] = []

    def command(what: str, host: Any) -> str:
        try:
            return send_command(runtime, running.job.id, {"do": what, "host": host})
        except ConfigError as problem:
            return str(problem)

    def add() -> None:
        answers.extend([command("add", 7), command("add", "a b"), command("drop", "nowhere")])
        answers.append(command("drop", "local"))
        answers.append(command("add", "lab"))

    threads = [threading.Thread(target=add)]

    def react(members: Sequence[int]) -> None:
        if members == (0,):
            threads[0].start()
        elif len(members) == 3:
            running.server.size = 2
        elif members == (1, 2):
            (folder / "enough").touch()

    running.server.react = react
    outcome = running.run()
    threads[0].join(LIMIT_S)
    assert answers[0] == "ringrun add needs a host." and "is not a host" in answers[1]
    assert answers[2:] == [
        "nowhere is no host of this job.", "local leaves when other hosts have joined: --min-np 1",
        "other with 2 slots is being added",
    ]  # fmt: skip
    assert running.server.excluded == [(0, "local is not available any more")]
    assert outcome.exit_code == 0 and sorted(outcome.members or ()) == [1, 2]
    assert [host.name for host in running.job.hosts] == ["local", "other"]
    assert running.job.hosts[1].planned.spec.python == sys.executable


# ---- hosts --------------------------------------------------------------------------------------------


def test_the_other_hosts_go_on_without_one_that_says_what_it_may_not(
    job: Callable[..., Running], folder: Path
) -> None:
    python, event = folder / "python", '{"event": "ready", "port": 1, "limits": {}}'
    python.write_text(
        f"#!{sys.executable}\nimport os, struct\ndata = b'{event}'\n"
        "os.write(1, b'\\nringrun-agent/1\\n' + struct.pack('!BiI', 4, -1, len(data)) + data + b'\\n')\n"
        "while os.read(0, 65536):\n    pass\n"
    )
    python.chmod(0o755)
    running = job(f"until grep -q invalid said; do sleep 0.02; done; {STAYS}", "local:2,other:1",
                  python=(f"other={python}",))  # fmt: skip
    running.console.react = lambda text: (folder / "said").write_text(text) and None
    running.server.react = enough(folder, 1)
    outcome = running.run()
    assert outcome.exit_code == 0, outcome.report
    assert running.console.text.count("other: its agent sent invalid data: an invalid event: ") >= 1


def test_a_host_that_is_lost(job: Callable[..., Running], folder: Path) -> None:
    """Its process is reported as lost; another host goes on."""
    running = job(f'[ -n "$TEST_HOST" ] && kill -9 $PPID; {WAIT}', hosts="local:1,other:1")

    def exited(member: int, how: str, ok: bool) -> None:
        report(member, how, ok)
        if how == "lost with its host":
            running.server.size = 1
            running.server.publish()
            (folder / "enough").touch()

    report = running.server.process_exited
    running.server.process_exited = exited  # type: ignore[method-assign]
    outcome = running.run()
    assert outcome.exit_code == 0 and outcome.members == [0]
    assert (1, "lost with its host", False) in running.server.exits
    assert "other" in running.console.text


# ---- what the rendezvous reports ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "text", "shown"),
    [
        ("timeout", "1 of 2 ranks are there", "Timed out waiting for minimum number of slots"),
        ("other", "two ranks disagree", "two ranks disagree"),
    ],
)
def test_the_rendezvous_ends_the_job(job: Callable[..., Running], kind: str, text: str, shown: str) -> None:
    running = job(STAYS)
    running.server.react = lambda members: running.server.fail(kind, text)
    outcome = running.run()
    assert (outcome.exit_code, outcome.reason) == (1, "failure")
    report = " ".join(outcome.report.replace("│", " ").split())
    assert shown in report and text in report


def test_a_member_that_is_declared_lost_is_ended(
    job: Callable[..., Running], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOST", ((9, 0.0),))
    running = job(f"[ $RINGCOMM_MEMBER = 1 ] && trap '' TERM INT && exec sleep 1000; {WAIT}")

    def react(members: Sequence[int]) -> None:
        if members == (0, 1):
            running.server.notify(notice("lost", "no heartbeat for 30 s", detail={"member": 1}))
            running.server.notify(notice("lost", "no single member", detail={"member": None}))
        else:
            (folder / "enough").touch()

    running.server.react = react
    outcome = running.run()
    assert outcome.exit_code == 0 and outcome.members == [0, 2]
    assert (1, "killed by SIGKILL", False) in running.server.exits
    assert "no heartbeat for 30 s" in outcome.report


# ---- ends ---------------------------------------------------------------------------------------------
