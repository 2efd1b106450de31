"""What hosts get that lack something: ringcomm, wheels, the user's files; and the discovery script."""

from __future__ import annotations

import io
import threading
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import pytest

from ringcomm.clock import Deadline, monotonic
from ringcomm.errors import ConfigError
from ringrun.agent import framing
from ringrun.elastic.job import Discovery, run_script
from ringrun.job import files
from ringrun.job.agents import Loop
from ringrun.job.files import Package, Supply, Target, own_package
from ringrun.job.launch import prepare
from ringrun.plan.hosts import HostSpec
from ringrun.plan.job import Job
from ringrun.plan.options import Options
from ringrun.reach import base
from tests.support.service import eventually

LIMIT_S = 60.0
NEEDS = {"found": {"version": "3.9.2"}, "machine": "aarch64", "glibc": "2.31"}
WHEELS = Package("wheels of numpy", {"numpy/__init__.py": b"1"})


class Hosts:
    """The agents of three hosts; archives (host, kind, archive) and commands are kept instead of sent."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.archives: List[Tuple[str, int, bytes]] = []
        self.commands: List[Tuple[str, Dict[str, Any]]] = []
        self.shown: List[str] = []
        self.problems: List[Tuple[str, str]] = []
        self.loop = Loop(monotonic)
        links = [SimpleNamespace(send_frame=partial(self._keep, host.name)) for host in job.hosts]
        agents: Any = SimpleNamespace(
            job=job, links=links, send=lambda host, command: self.commands.append((host.name, command))
        )
        self.supply = Supply(
            agents, self.loop, self.shown.append, lambda host, text: self.problems.append((host.name, text))
        )

    def _keep(self, name: str, kind: int, archive: bytes) -> None:
        self.archives.append((name, kind, archive))

    def until(self, count: int) -> None:
        """Serve the loop until so many hosts have got a command or have a problem."""
        deadline = Deadline(LIMIT_S)
        while len(self.commands) + len(self.problems) < count:
            assert not deadline.expired()
            self.loop.run_once(1.0)


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> Options:
    monkeypatch.setattr(base, "find_local", lambda specs, **_: [False] * len(specs))
    return Options(hosts="a,b,c")


@pytest.fixture
def hosts(options: Options) -> Iterator[Hosts]:
    made = Hosts(prepare(options, ["true"]))
    yield made
    made.loop.close()


def test_a_host_gets_the_files_that_it_lacks(
    options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("train.py", "helper.py"):
        (tmp_path / name).write_text(f"# {name}\n")
    monkeypatch.chdir(tmp_path)
    hosts = Hosts(prepare(replace(options, hosts="a", ship=str(tmp_path)), ["train.py"], {"PATH": "/"}))
    hosts.loop.close()
    assert hosts.job.tree is not None
    digests = {path: digest for path, digest, _ in hosts.job.tree.files}
    hosts.supply.send(hosts.job.hosts[0], {"files": [digests["helper.py"]]})
    ((name, kind, archive),) = hosts.archives
    assert (name, kind) == ("a", framing.CODE)
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        assert {item: files.read(item) for item in files.namelist()} == {
            digests["helper.py"]: b"# helper.py\n"
        }
    assert len(hosts.shown) == 1 and "a" in hosts.shown[0]


def test_wheels_are_downloaded_once_for_equal_hosts(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: List[Tuple[Target, Tuple[str, ...]]] = []

    def fetch(target: Target, names: Tuple[str, ...]) -> Tuple[Package, List[str]]:
        asked.append((target, names))
        return WHEELS, ["numpy 1.26", "psutil 5.9"][: len(names)] if target.machine == "aarch64" else []

    monkeypatch.setattr(files, "fetch_wheels", fetch)
    for host in hosts.job.hosts[:2]:
        hosts.supply.provision(host, NEEDS)
    hosts.until(2)
    assert asked == [(Target("3.9", "aarch64", "2.31"), ("numpy", "psutil"))]
    use = {"do": "use", "package": WHEELS.digest}
    assert hosts.commands == [("a", use), ("b", use)] and hosts.problems == []
    assert hosts.shown == ["wheels for a, b: numpy 1.26; psutil 5.9"]
    hosts.supply.send(hosts.job.hosts[0], {})
    hosts.supply.send(hosts.job.hosts[2], {})
    sent = {name: archive for name, _, archive in hosts.archives}
    assert sent == {"a": WHEELS.archive, "c": own_package().archive}, "c has not asked for wheels"
    found = {"version": "3.9.2", "lacks": ["psutil", "ringcomm"]}
    hosts.supply.provision(hosts.job.hosts[2], {**NEEDS, "found": found, "machine": "x86_64"})
    hosts.until(3)
    assert asked[1:] == [(Target("3.9", "x86_64", "2.31"), ("psutil",))]
    assert not any("wheels for c" in line for line in hosts.shown), "they were not downloaded now"


# ---- the thread that runs the host discovery script ----------------------------------------------


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
    with pytest.raises(ConfigError, match=text):
        run_script(command, LIMIT_S, threading.Event())


def test_a_script_that_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    children = tmp_path / "children"
    script = f"echo one; echo note >&2; [ -e {children} ] || {{ sleep 1000 & echo $! >{children}; wait; }}"
    with pytest.raises(ConfigError, match="has not ended within 0.5 s"):
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
