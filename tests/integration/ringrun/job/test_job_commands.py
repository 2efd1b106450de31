"""``ringrun ps``, ``stop``, ``add`` and ``drop``, with jobs that are only sockets."""

from __future__ import annotations

import json
import socket
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Tuple

import pytest

from ringcomm.errors import ConfigError
from ringrun import cli
from ringrun.job.control import (
    REQUEST_LIMIT_BYTES,
    ControlSocket,
    change_hosts,
    jobs_of,
    send_command,
    show_jobs,
    stop_job,
)

ABC, ABD, XYZ, FIXED, LEFT, GOING = (name.ljust(16, "0") for name in ("abc", "abd", "7", "f", "1ef", "90"))


class Jobs:
    """The running jobs of a user."""

    def __init__(self, runtime: str) -> None:
        self.environ = {"XDG_RUNTIME_DIR": runtime}
        self.folder = Path(runtime) / "ringrun"  # of the sockets
        self.commands: List[Tuple[str, Mapping[str, Any]]] = []  # job and command, without requests for facts
        self._servers: List[ControlSocket] = []

    def start(self, name: str, **changes: Any) -> None:
        facts: Dict[str, Any] = {
            "pid": 7, "program": "train.py", "began_at": time.time() - 100.0, "ranks": 2, "hosts": ["desk"],
            "elastic": True, **changes,
        }  # fmt: skip

        def execute(command: Mapping[str, Any]) -> str:
            if command.get("do") == "info":
                return json.dumps(facts)
            self.commands.append((name, command))
            return f"{name} is being ended"

        server = ControlSocket(name, execute, self.folder)
        server.start()
        self._servers.append(server)

    def stop(self) -> None:
        for server in self._servers:
            server.stop()


@pytest.fixture
def jobs(no_leaks: None) -> Iterator[Jobs]:
    with tempfile.TemporaryDirectory(prefix="ringrun-") as runtime:  # a short path: sockets have a limit
        made = Jobs(runtime)
        yield made
        made.stop()


def test_jobs_are_listed_the_oldest_first(jobs: Jobs) -> None:
    assert show_jobs(jobs.environ)[0].startswith("No job of yours")
    jobs.start("aaaaaaaabbbbbbbb", pid=1, began_at=time.time() - 3630.0)
    jobs.start("ccccccccdddddddd", pid=2, began_at=time.time() - 9030.0, hosts=["desk", "jetson1"], ranks=3)
    lines = show_jobs(jobs.environ)[0].splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [["cccccccc", "2", "3"], ["aaaaaaaa", "1", "2"]]
    assert "2 h 30 min" in lines[1] and "desk,jetson1" in lines[1] and "1 h 0 min" in lines[2]


@pytest.mark.parametrize(
    "facts", [{"pid": "x"}, {"pid": float("inf")}, {"hosts": 7}, {"began_at": []}],
    ids=["pid", "infinite", "hosts", "time"],
)  # fmt: skip
def test_a_job_whose_answer_makes_no_sense_is_named(jobs: Jobs, facts: Dict[str, Any]) -> None:
    jobs.start(ABC)
    jobs.start(XYZ, **facts)
    found, problems = jobs_of(jobs.folder)
    assert [job.id for job in found] == [ABC]
    assert problems == [f"The job {XYZ} does not answer: what it says of itself is not valid."]
    text, shown = show_jobs(jobs.environ)
    assert ABC[:8] in text and shown == problems


def agree(*_: str) -> bool:
    return True


def test_of_several_jobs_one_is_named_by_its_beginning(jobs: Jobs) -> None:
    jobs.start(ABC)
    jobs.start(ABD, program="eval.py\x1b[2J\n")
    for beginning in ("", "ab"):
        with pytest.raises(ConfigError, match="2 jobs run: ab.*Name one as in `ringrun stop JOB`") as caught:
            stop_job(beginning, jobs.environ, agree)
        assert "\x1b" not in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="No running job of yours begins with 'x'. 2 jobs run: ab"):
        stop_job("x", jobs.environ, agree)
    stop_job("abd", jobs.environ, agree)
    assert jobs.commands == [(ABD, {"do": "stop"})]


def test_hosts_of_elastic_jobs_only_can_be_changed(jobs: Jobs) -> None:
    jobs.start(FIXED, elastic=False)
    with pytest.raises(ConfigError, match="No elastic job of yours runs .*--min-np"):
        change_hosts("add", "jetson1", "", jobs.environ)
    with pytest.raises(ConfigError, match=f"The job {FIXED} is not elastic"):
        change_hosts("add", "jetson1", FIXED, jobs.environ)
    jobs.start(ABC)
    jobs.start(XYZ)
    assert change_hosts("add", "jetson1:2", "7", jobs.environ) == f"{XYZ} is being ended"
    assert jobs.commands == [(XYZ, {"do": "add", "host": "jetson1:2"})]
    with pytest.raises(ConfigError, match="2 jobs run.*Name one as in `ringrun stop JOB`"):
        change_hosts("drop", "jetson1", "", jobs.environ)


@pytest.mark.parametrize(
    "words",
    [["add", "--job", "ab", "h:2"], ["add", "h:2", "--job", "ab"], ["add", "--job=ab", "h:2"], ["stop", "ab"],
     ["stop", "--job", "ab"], ["drop", "--job", "ab", "h"]],
    ids=" ".join,
)  # fmt: skip
def test_each_command_names_a_job_in_the_same_way(
    jobs: Jobs, words: List[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", jobs.environ["XDG_RUNTIME_DIR"])
    jobs.start(ABC)
    jobs.start(XYZ)
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 0
    host = {"stop": {}, "add": {"host": "h:2"}, "drop": {"host": "h"}}[words[0]]
    assert jobs.commands == [(ABC, {"do": words[0], **host})]


# ---- the socket ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent",
    [b"{\n", b"[]\n", b"\xff\n", b"[" * (REQUEST_LIMIT_BYTES + 1), b"x"],
    ids=["json", "object", "text", "length", "end"],
)
def test_a_request_that_is_not_valid_is_refused(jobs: Jobs, sent: bytes) -> None:
    jobs.start(ABC)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60.0)
        connection.connect(str(jobs.folder / f"{ABC}.sock"))
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        answer = json.loads(connection.recv(1000).decode())
    assert answer == {"ok": False, "text": "The request is not valid."} and jobs.commands == []


def test_sockets_without_a_job(jobs: Jobs) -> None:
    """One was left by a job that was killed; it is removed. Another one disappears while it is looked at."""
    jobs.start(ABC)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(jobs.folder / f"{LEFT}.sock"))
    (jobs.folder / f"{GOING}.sock").symlink_to("/nonexistent/socket")
    found, problems = jobs_of(jobs.folder)
    assert [job.id for job in found] == [ABC] and problems == []
    assert not (jobs.folder / f"{LEFT}.sock").exists() and jobs_of(Path("/nonexistent")) == ([], [])
    with pytest.raises(ConfigError, match=f"The job {GOING} does not answer: "):
        send_command(jobs.folder, GOING, {"do": "stop"})
