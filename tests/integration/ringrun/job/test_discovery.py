"""The thread that runs the host discovery script: its first run, and its end at any time."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Iterator, List, Optional, Sequence

import pytest

from ringrun.elastic.job import Discovery, ScriptError, run_script
from ringrun.plan.hosts import HostSpec
from tests.support.service import eventually

LIMIT_S = 60.0


class Scripts:
    """The reports of a discovery thread."""

    def __init__(self) -> None:
        self.lists: List[List[str]] = []  # the hosts' names after each run
        self.lines: List[str] = []
        self.failure: Optional[str] = None  # of the first run
        self.reported = threading.Event()
        self.threads: List[Discovery] = []

    def run(self, command: str) -> Discovery:
        made = Discovery(command, 2, self.listed, self.lines.append, self.failed)
        self.threads.append(made)
        return made

    def listed(self, hosts: Sequence[HostSpec]) -> None:
        self.lists.append([f"{item.target}:{item.slots}" for item in hosts])
        self.reported.set()

    def failed(self, text: str) -> None:
        self.failure = text
        self.reported.set()


@pytest.fixture
def scripts(no_leaks: None) -> Iterator[Scripts]:
    made = Scripts()
    yield made
    for thread in made.threads:
        thread.stop()


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("echo it is broken >&2; exit 5", "ended with exit code 5: it is broken"),
        ("exit 6", "ended with exit code 6$"),
        ("head -c 1048577 /dev/zero", "has written more than 1048576 bytes"),
        (r"printf '\377'", "has written bytes that are not text in UTF-8"),
    ],
)
def test_a_script_that_fails(command: str, text: str) -> None:
    with pytest.raises(ScriptError, match=text):
        run_script(command, LIMIT_S, threading.Event())


def test_a_script_that_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    children = tmp_path / "children"
    script = f"echo one; echo note >&2; [ -e {children} ] || {{ sleep 1000 & echo $! >{children}; wait; }}"
    with pytest.raises(ScriptError, match="has not ended within 0.5 s"):
        run_script(script, 0.5, threading.Event())
    stat = Path(f"/proc/{children.read_text().strip()}/stat")
    assert eventually(lambda: not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX")
    assert run_script(script, LIMIT_S, threading.Event()) == "one\n"


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("exit 5", "exit 5 ended with exit code 5."),
        ("echo 'It is off.' >&2; exit 5", "exit code 5: It is off."),
        ("echo 'a b'", "line 1 of the discovery script's output"),
    ],
)
def test_a_first_run_that_fails_is_the_last(scripts: Scripts, command: str, text: str) -> None:
    scripts.run(command).start()
    assert scripts.reported.wait(LIMIT_S)
    scripts.threads[0]._thread.join(LIMIT_S)
    assert not scripts.threads[0]._thread.is_alive() and scripts.lists == [] == scripts.lines
    assert scripts.failure is not None and text in scripts.failure
    assert scripts.failure.startswith("The host discovery script failed at its first run: ")
    assert not scripts.failure.endswith("..")


def test_a_later_failure_is_reported(scripts: Scripts, tmp_path: Path) -> None:
    """The hosts that were listed before remain."""
    scripts.run(f"[ -e {tmp_path}/broken ] && exit 6; echo one").start()
    assert scripts.reported.wait(LIMIT_S)
    (tmp_path / "broken").touch()
    assert eventually(lambda: bool(scripts.lines), LIMIT_S)
    scripts.threads[0].stop()
    assert scripts.lines[0].startswith("the discovery script failed; its last hosts remain: ")
    assert "exit code 6" in scripts.lines[0]
    assert scripts.failure is None


def test_a_thread_that_is_stopped_ends_its_script(scripts: Scripts, tmp_path: Path) -> None:
    running = tmp_path / "running"
    scripts.run(f"touch {running}; exec sleep 1000").start()
    assert eventually(running.exists, LIMIT_S)
    scripts.threads[0].stop()
    assert scripts.lists == [] and scripts.failure is None, "it was ended by the job"
    scripts.threads[0].stop()
