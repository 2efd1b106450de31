"""``ringrun ps``, ``stop``, ``add`` and ``drop``, with jobs that are only sockets."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Tuple

import pytest

from ringcomm.errors import ConfigError
from ringrun.job import control_socket
from ringrun.job.control_socket import (
    REQUEST_LIMIT_BYTES,
    ControlSocket,
    is_same_user,
    job_facts,
    running_jobs,
    send_command,
)
from ringrun.job.job_commands import change_hosts, jobs_of, show_jobs, stop_job
from ringrun.job.launch import Options, prepare


class Jobs:
    """The running jobs of a user.

    Attributes:
        environ: the environment of the commands.
        folder: of the sockets.
        commands: what has reached which job, without the questions for facts.
    """

    def __init__(self, runtime: str) -> None:
        self.environ = {"XDG_RUNTIME_DIR": runtime}
        self.folder = Path(runtime) / "ringrun"
        self.commands: List[Tuple[str, Mapping[str, Any]]] = []
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
    assert show_jobs(jobs.environ).startswith("No job of yours")
    jobs.start("aaaaaaaabbbb", pid=1, began_at=time.time() - 3630.0)
    jobs.start("ccccccccdddd", pid=2, began_at=time.time() - 9030.0, hosts=["desk", "jetson1"], ranks=3)
    lines = show_jobs(jobs.environ).splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [["cccccccc", "2", "3"], ["aaaaaaaa", "1", "2"]]
    assert "2 h 30 min" in lines[1] and "desk,jetson1" in lines[1] and "1 h 0 min" in lines[2]


@pytest.mark.parametrize(
    "facts", [{"pid": "x"}, {"hosts": 7}, {"began_at": []}], ids=["pid", "hosts", "time"]
)
def test_a_job_whose_answer_makes_no_sense_is_left_out(jobs: Jobs, facts: Dict[str, Any]) -> None:
    jobs.start("good")
    jobs.start("odd", **facts)
    assert [job.id for job in jobs_of(jobs.folder)] == ["good"]


def test_the_only_job_is_ended(jobs: Jobs) -> None:
    with pytest.raises(ConfigError, match="No job of yours was started"):
        stop_job([], jobs.environ)
    jobs.start("abc", elastic=False)
    assert stop_job([], jobs.environ) == "abc is being ended"
    assert jobs.commands == [("abc", {"do": "stop"})]


def test_of_several_jobs_one_is_named_by_its_beginning(jobs: Jobs) -> None:
    jobs.start("abc")
    jobs.start("abd", program="eval.py\x1b[2J")
    for words in ([], ["ab"], ["x"]):
        with pytest.raises(ConfigError, match="2 jobs run: ab. .*Name one with ringrun stop JOB") as caught:
            stop_job(words, jobs.environ)
        assert "\x1b" not in str(caught.value)
    stop_job(["abd"], jobs.environ)
    assert jobs.commands == [("abd", {"do": "stop"})]


def test_hosts_of_elastic_jobs_only_can_be_changed(jobs: Jobs) -> None:
    jobs.start("fixed", elastic=False)
    with pytest.raises(ConfigError, match="No elastic job of yours runs .*--min-np"):
        change_hosts("add", ["jetson1"], jobs.environ)
    jobs.start("abc")
    jobs.start("xyz")
    assert change_hosts("add", ["jetson1:2", "--job", "x"], jobs.environ) == "xyz is being ended"
    assert jobs.commands == [("xyz", {"do": "add", "host": "jetson1:2"})]
    with pytest.raises(ConfigError, match="2 jobs run.*Name one with --job ID"):
        change_hosts("drop", ["jetson1"], jobs.environ)
    with pytest.raises(ConfigError, match="'--jib' is no option. Write: ringrun drop HOST --job ID"):
        change_hosts("drop", ["jetson1", "--jib", "x"], jobs.environ)


def test_with_one_job_its_name_is_not_needed_but_must_be_right(jobs: Jobs) -> None:
    jobs.start("abc")
    change_hosts("drop", ["jetson1"], jobs.environ)
    assert jobs.commands == [("abc", {"do": "drop", "host": "jetson1"})]
    with pytest.raises(ConfigError, match="1 job runs: abc"):
        change_hosts("drop", ["jetson1", "--job", "x"], jobs.environ)


# ---- the socket ---------------------------------------------------------------------------------------


def test_what_a_job_answers_about_itself() -> None:
    job = prepare(Options(np=3), ["train.py"], {"PATH": "/"})
    assert json.loads(job_facts(job, 12.5, 1)) == {
        "pid": os.getpid(), "program": "train.py", "began_at": 12.5, "ranks": 2, "hosts": ["localhost"],
        "elastic": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    "sent", [b"{\n", b"[]\n", b"\xff\n", b"[" * (REQUEST_LIMIT_BYTES + 1), b"x"],
    ids=["json", "object", "text", "length", "end"],
)
def test_a_request_that_is_not_valid_is_refused(jobs: Jobs, sent: bytes) -> None:
    jobs.start("abc")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60.0)
        connection.connect(str(jobs.folder / "abc.sock"))
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        answer = json.loads(connection.recv(1000).decode())
    assert answer == {"ok": False, "text": "The request is not valid."} and jobs.commands == []


def test_a_request_may_come_in_pieces(jobs: Jobs) -> None:
    jobs.start("abc")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60.0)
        connection.connect(str(jobs.folder / "abc.sock"))
        for piece in (b'{"do": ', b'"stop"}', b"\n"):
            connection.sendall(piece)
        assert json.loads(connection.recv(1000).decode())["ok"]
    assert jobs.commands == [("abc", {"do": "stop"})]


def test_sockets_without_a_job(jobs: Jobs) -> None:
    """One was left by a job that was killed; it is removed. Another one disappears while it is looked at."""
    jobs.start("abc")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(jobs.folder / "left.sock"))
    (jobs.folder / "going.sock").symlink_to("/nonexistent/socket")
    assert running_jobs(jobs.folder) == ["abc"]
    assert not (jobs.folder / "left.sock").exists() and running_jobs(Path("/nonexistent")) == []
    with pytest.raises(ConfigError, match="The job going does not answer: "):
        send_command(jobs.folder, "going", {"do": "stop"})


@pytest.mark.parametrize("answer", [b"", b"[]\n", b"{"])
def test_a_job_that_does_not_answer_as_jobs_do(jobs: Jobs, answer: bytes) -> None:
    jobs.folder.mkdir()

    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(REQUEST_LIMIT_BYTES)
            connection.sendall(answer)

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(jobs.folder / "odd.sock"))
        server.listen(1)
        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(ConfigError, match="The job odd does not answer: .*its answer is not valid"):
            send_command(jobs.folder, "odd", {"do": "stop"})
        thread.join()


def test_a_job_of_many_hosts_is_listed(jobs: Jobs) -> None:
    """Its answer is longer than any request may be."""
    names = [f"node{number:04}.cluster.example" for number in range(1000)]
    jobs.start("abc", hosts=names)
    (job,) = jobs_of(jobs.folder)
    assert job.hosts == names


def test_a_folder_that_cannot_be_made(jobs: Jobs) -> None:
    folder = jobs.folder / "below" / "a" / "file"
    jobs.folder.touch()
    server = ControlSocket("abc", str, folder)
    with pytest.raises(ConfigError, match="`ringrun stop`, .* cannot reach this job: .*XDG_RUNTIME"):
        server.start()
    server.stop()  # which has nothing to do


def test_the_socket_may_be_removed_before_the_end(jobs: Jobs) -> None:
    """By a program that cleans up temporary files."""
    jobs.start("abc")
    (jobs.folder / "abc.sock").unlink()
    jobs.stop()
    jobs.stop()


def test_another_user_gets_no_answer(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs.start("abc")
    monkeypatch.setattr(control_socket, "is_same_user", lambda connection: False)
    with pytest.raises(ConfigError, match="The job abc does not answer"):
        send_command(jobs.folder, "abc", {"do": "stop"})
    assert jobs.commands == []


@pytest.mark.parametrize("reports", [True, False])
def test_the_kernel_reports_the_user_where_it_can(monkeypatch: pytest.MonkeyPatch, reports: bool) -> None:
    uid: Callable[[], int] = os.geteuid
    own = uid()
    if not reports:
        monkeypatch.delattr(socket, "SO_PEERCRED")
    first, second = socket.socketpair(socket.AF_UNIX)
    with first, second:
        assert is_same_user(first)
        monkeypatch.setattr(os, "geteuid", lambda: own + 1)
        assert is_same_user(first) is not reports
