"""The doctor's program on a host, with programs that misbehave; and ``ringrun clean`` on several hosts."""

from __future__ import annotations

import ast
import os
import select
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Iterator, List, Sequence

import pytest

from ringcomm.transport.nics import Attempt
from ringrun import cli
from ringrun.agent import shipped
from ringrun.doctor import hosts as module
from ringrun.doctor import probe
from ringrun.doctor.hosts import FORMS, HostProbe
from ringrun.doctor.report import examine
from ringrun.job.launch import prepare
from ringrun.plan.job import HostJob
from ringrun.plan.options import Options
from ringrun.reach import base, protocol
from ringrun.reach.base import Ssh

LIMIT_S = 60.0
ANSWERS = f"printf '\\n{probe.MARKER}\\n'; "


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take long to start a program."""
    monkeypatch.setattr(module, "START_LIMIT_S", LIMIT_S)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Callable[..., HostJob]:
    """`host(program)`: a host on which a shell program runs in place of the doctor's."""
    monkeypatch.setattr(base, "find_local", lambda specs, **_: [False] * len(specs))

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
    assert found.problem == "" and found.noise == ""
    assert found.ask(LIMIT_S, do="facts", cwd="/")["python"]
    found.end()
    assert found.link.process.returncode == 0
    assert found.ask(LIMIT_S, do="facts", cwd="/") is None
    assert found.problem == "a: it stopped answering (facts)."


def test_a_login_that_fails_once_is_tried_again_as_by_a_job(host: Any, start: Any, tmp_path: Path) -> None:
    dropped = "kex_exchange_identification: Connection closed by remote host"
    mark, made = tmp_path / "once", host()
    script = f'test -e {mark} || {{ touch {mark}; echo {dropped} >&2; exit 255; }}; exec "$@"'
    argv = ("sh", "-c", script, "login", *made.argv)
    found = start(replace(made, argv=argv, reach=Ssh(Options())))
    assert found.problem == "" and found.link.attempt == 2
    assert found.ask(LIMIT_S, do="facts", cwd="/") is not None


def test_what_the_program_has_started_here_is_ended_with_it(
    host: Any, start: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As the ssh of a jump host."""
    monkeypatch.setattr(module, "END_S", 0.1)
    os.mkfifo(tmp_path / "alive")
    reader = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    found = start(host(f"exec 7>{tmp_path}/alive; sleep 1000 & {ANSWERS} wait"))
    assert found.problem == ""
    found.end()
    assert select.select([reader], [], [], LIMIT_S)[0] and os.read(reader, 1) == b""
    os.close(reader)


def test_what_the_login_prints_is_kept_apart(host: Any, start: Any) -> None:
    program = 'echo Welcome; echo; echo " "; echo to a; exec "$@"'
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
    wrong = "its answer (facts) is not valid: Expecting value: line 1 column 1 (char 0)."
    assert found.problem == f"a: {wrong if 'echo' in answer else 'it stopped answering (facts).'}"


@pytest.mark.parametrize(
    "answer",
    ["{}", "[]", "null", "7", '{"hostname": [1]}', "[" * 5000, '"x"', '{"removed": [["package", "x", -1]]}'],
)
def test_odd_answers_are_a_problem_of_their_host_alone(host: Any, start: Any, answer: str) -> None:
    found = start(host(f"{ANSWERS} read line; echo '{answer}'; exec cat"))
    command = {"do": "clean"} if "removed" in answer else {"do": "facts", "cwd": "/"}
    assert found.ask(LIMIT_S, **command) is None
    assert found.problem.startswith(f"a: its answer ({command['do']}) is not valid: ")
    assert len(found.problem) < 250


def test_a_host_answers_for_itself_and_what_it_was_asked_alone() -> None:
    target = {"rank": 1, "addresses": [{"address": "10.0.0.1"}], "machine": ""}
    row = Attempt(0, 1, "10.0.0.1", 7, "10.0.0.2", "eth0", "eth0", "wired", "").to_json()
    form = FORMS["probe"]({"targets": [target]})
    assert form([row]) == [Attempt(**row)]
    for changes in ({"target": 2}, {"address": "10.0.0.9"}, {"kind": "x"}, {"local": "\n"}, {"port": -1}):
        with pytest.raises(ValueError):
            form([{**row, **changes}])
    with pytest.raises(ValueError):
        form([row] * 101)
    speed = {"rank": 1, "address": "10.0.0.1", "iface": "eth0", "mb_per_s": 1.0, "there_mb_per_s": 1.0,
             "back_mb_per_s": 1.0}  # fmt: skip
    form = FORMS["measure"]({"pairs": [{"rank": 1, "wires": [{}]}]})
    assert form([speed]) == [speed]
    for changes in ({"rank": 0}, {"mb_per_s": "1"}, {"back_mb_per_s": -1.0}):
        with pytest.raises(ValueError):
            form([{**speed, **changes}])


def test_one_thread_alone_parses_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 3.11.8, Python 3.11 reports a SystemError if several do."""
    threads = []

    def parse(*given: Any) -> ast.Module:
        threads.append(threading.current_thread())
        return ast.parse(*given)

    monkeypatch.setattr(protocol, "ast", SimpleNamespace(**{**vars(ast), "parse": parse}))
    protocol.program.cache_clear()
    job = prepare(Options(hosts="a,b,c", via="env NAME={host}", ship_self=False), ["true"])
    examine(replace(job, hosts=tuple(replace(host, argv=("sh", "-c", "exit 1")) for host in job.hosts)))
    assert set(threads) == {threading.current_thread()}


# ---- ringrun clean -------------------------------------------------------------------------------


DIGEST = "ab" * 16


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    """``run(*words)``: exit code and output of ``ringrun clean``; b and c are reached by a command."""
    monkeypatch.setattr(shipped, "SHARED_PLACES", ())
    monkeypatch.setattr(shipped.tempfile, "gettempdir", lambda: str(tmp_path / "a" / "tmp"))
    for name, folder in (("XDG_CACHE_HOME", "a/cache"), ("XDG_CONFIG_HOME", "a/config"), ("HOME", "a")):
        monkeypatch.setenv(name, str(tmp_path / folder))
    monkeypatch.delenv("TMPDIR", raising=False)
    script = tmp_path / "reach"
    script.write_text(
        f'#!/bin/sh\nhost=$1; shift\n[ "$host" = gone ] && {{ echo no way >&2; exit 3; }}\n'
        f'export XDG_CACHE_HOME="{tmp_path}/$host/cache" TMPDIR="{tmp_path}/$host/tmp"; mkdir -p "$TMPDIR"\n'
        'exec "$@"\n'
    )
    script.chmod(0o755)
    for host in ("a", "b", "c"):
        package = tmp_path / host / "cache" / "ringcomm" / DIGEST
        package.mkdir(parents=True, mode=0o700)
        (package / "file").write_bytes(bytes(200_000))

    def call(*words: str) -> Any:
        with pytest.raises(SystemExit) as caught:
            cli.main(["clean", "--via", f"{script} {{host}}", *words])
        out, err = capsys.readouterr()
        return caught.value.code, out + err

    return call


def packages(tmp_path: Path) -> str:
    return "".join(sorted(path.parts[-4] for path in tmp_path.glob(f"*/cache/ringcomm/{DIGEST}")))


def test_this_machine_and_the_hosts_of_all_lists(run: Any, tmp_path: Path) -> None:
    lists = tmp_path / "a" / "config" / "ringcomm" / "hosts"
    lists.mkdir(parents=True, mode=0o700)
    (lists / "one").write_text("localhost\nb\n")
    (lists / "two").write_text("c:2\nb\n")
    code, text = run("--dry-run")
    assert code == 0 and packages(tmp_path) == "abc"
    # This machine's /tmp may have packages of other runs, which b and c would remove as well.
    names = ["this machine", "b", "c"]
    assert [line.split(":")[0] for line in text.splitlines() if ": would remove" in line] == names
    for host in "abc":
        assert f"  package  {tmp_path}/{host}/cache/ringcomm/{DIGEST}  0.2 MB" in text
    code, text = run()
    assert code == 0 and text.count(": removed ") == 3 and packages(tmp_path) == ""
    assert run()[1].count(": nothing to remove") == 3


def test_the_hosts_that_are_named_and_one_that_cannot_be_reached(run: Any, tmp_path: Path) -> None:
    code, text = run("-H", "localhost,gone,b")
    assert code == 1 and packages(tmp_path) == "c", text
    assert "gone: " in text and "no way" in text and "b: removed" in text


def test_what_a_host_says_is_made_visible() -> None:
    rows = {"removed": [["package", "/\x1b[2J", 5]], "kept": [["/x", "why\n"]]}
    assert module._lines("h", rows, False) == [
        "h: removed 0.0 KB", "  package  /\\x1b[2J  0.0 KB", "  kept  /x: why\\n",
    ]  # fmt: skip
