"""Files and folders that others could prepare: how each is made before a test, used, and where it lies."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Dict, List

import pytest

from ringcomm import newkey
from ringcomm.clock import Deadline
from ringcomm.configuration.membership import Launched
from ringcomm.errors import ConfigError
from ringcomm.rendezvous.embedded import FileNotice
from ringcomm.storage.files import open_named
from ringcomm.storage.keys import read_key
from ringrun import project
from ringrun.agent import shipped
from ringrun.agent.shipped import JobFolder
from ringrun.diagnosis import records
from ringrun.job.files import FetchedFiles
from ringrun.job.launch import prepare
from ringrun.plan.options import Options
from ringrun.reach import named_hosts
from ringrun.ship import contents
from ringrun.ship.contents import Package
from ringrun.show.output import OutputFiles

GOOD, EVIL = "ab" * 16, "ee" * 16
PACKAGE = Package("example 1.0", {"a.py": GOOD.encode()})


class Row:
    """One row of the table: a `target` that another user prepares, in the folder `parent`."""

    reads = code = False  # an existing file is read; only the folder keeps the target from being exchanged.

    def __init__(self, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.base = base
        self.parent = base / "out"
        self.parent.mkdir()
        self.target = self.parent / "file"
        self.environ = {"XDG_CACHE_HOME": str(base / "cache"), "TMPDIR": str(base / "tmp")}
        monkeypatch.setattr(shipped, "SHARED_PLACES", ())
        self.make(monkeypatch)

    def make(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Do what an earlier job has done."""

    def use(self) -> str:
        """Read or write it; returns what was read, or what stands there then."""
        raise NotImplementedError


class KeyFile(Row):
    reads = True

    def make(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.target.write_text(GOOD)
        self.target.chmod(0o600)

    def use(self) -> str:
        return read_key(None, str(self.target), "")[0].hex()


class NewKey(Row):
    def use(self) -> str:
        if newkey.main([str(self.target)]):
            raise ConfigError("refused")
        assert len(read_key(None, str(self.target), "")[0]) == 32
        return GOOD


class Notice(Row):
    reads = True

    def make(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.notice(0).publish(GOOD)
        (self.target,) = self.parent.iterdir()

    def notice(self, rank: int) -> FileNotice:
        return FileNotice(Launched("srun", rank, 2, "slurm 7.0", str(self.parent)), 0)

    def use(self) -> str:
        found = self.notice(1).read(Deadline(0.0))
        if found not in (GOOD, EVIL):
            raise ConfigError("it is not what rank 0 publishes")
        return found


class NoticeOfRank0(Notice):
    reads = False

    def use(self) -> str:
        self.notice(0).publish(GOOD)
        return self.target.read_text()


class ShippedPackage(Row):
    code = True

    def make(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.target = Path(shipped.unpack(PACKAGE.archive, PACKAGE.digest, self.environ))
        self.parent = self.base / "cache"

    def use(self) -> str:
        path = shipped.find(PACKAGE.digest, self.environ)
        path = path or shipped.unpack(PACKAGE.archive, PACKAGE.digest, self.environ)
        return Path(path, "a.py").read_text()


class ShippedFiles(Row):
    code = True

    def make(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.job = 0
        self.use()
        self.parent = self.base / "cache"
        (self.target,) = (self.parent / "ringcomm" / "files").iterdir()

    def use(self) -> str:
        self.job += 1
        name = shipped.hashlib.sha256(GOOD.encode()).hexdigest()[:32]
        folder = JobFolder(f"job{self.job}", [("train.py", name, False)], self.environ)
        facts = folder.prepare(b"")
        if facts.get("files"):
            facts = folder.prepare(Package("files", {name: GOOD.encode()}).archive)
        if folder._lock >= 0:
            os.close(folder._lock)  # as at the end of its agent
        if "problem" in facts:
            raise ConfigError(facts["why"])
        return Path(str(folder.path), "train.py").read_text()


def pip(argv: List[str], **_: object) -> Any:
    """Write a wheel as pip does."""
    with zipfile.ZipFile(Path(argv[argv.index("--dest") + 1], "numpy-1.0-cp38-x.whl"), "w") as wheel:
        wheel.writestr("numpy/__init__.py", GOOD)
    return subprocess.CompletedProcess(argv, 0, b"", b"")


class Wheels(Row):
    code = True

    def make(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fake = SimpleNamespace(run=pip, DEVNULL=None, TimeoutExpired=subprocess.TimeoutExpired)
        monkeypatch.setattr(contents, "subprocess", fake)
        self.use()
        self.parent = self.base / "cache"
        (self.target,) = self.parent.rglob("*.whl")

    def use(self) -> str:
        package, _ = contents.fetch_wheels(contents.Target("3.8", "aarch64", "2.31"), self.environ, ["numpy"])
        return package._files["numpy/__init__.py"].decode()


class Fetched(Row):
    def make(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.parent = self.base / "fetched" / "a"
        self.parent.mkdir(parents=True)
        self.target = self.parent / "x"

    def use(self) -> str:
        files = FetchedFiles(self.base / "fetched")
        facts = {"path": "x", "offset": 0, "last": True}
        files.take("a", json.dumps(facts).encode() + b"\n" + GOOD.encode(), ["*"])
        job: Any = SimpleNamespace(last_hosts=[], fetch=("*",))
        problems = files.describe(job)
        if problems:
            raise ConfigError(problems)
        return self.target.read_text()


class Records(Row):
    def make(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.target = self.parent / "flight.0.json"
        self.job = prepare(Options(np=1, output_dir=str(self.parent)), ["true"])

    def use(self) -> str:
        records.keep_records(self.job, {0: {"key": GOOD}})
        return str(json.loads(self.target.read_text())["key"])


class TemporaryRecords(Row):
    def make(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tempfile, "gettempdir", lambda: str(self.parent))
        self.target = self.parent / "ringrun-flight-0"
        self.job = prepare(Options(np=1), ["true"])

    def use(self) -> str:
        folder = records.keep_records(self.job, {0: {"key": GOOD}})
        return str(json.loads((folder / "flight.0.json").read_text())["key"])


class Output(Row):
    def make(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.parent = self.base / "out" / "rank.0"
        self.parent.mkdir()
        self.target = self.parent / "stdout"

    def use(self) -> str:
        files = OutputFiles(self.base / "out")
        files.add(0)
        problem = files.write(0, 1, GOOD.encode())
        files.close()
        if problem:
            raise ConfigError(problem)
        return self.target.read_text()


class Named(Row):
    def use(self) -> str:
        descriptor = open_named(self.target)
        try:
            os.write(descriptor, GOOD.encode())
        finally:
            os.close(descriptor)
        return self.target.read_text()


class HostList(Row):
    reads = True

    def make(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.environ["XDG_CONFIG_HOME"] = str(self.base / "out")
        named_hosts.add_hosts("lab", [GOOD], self.environ)
        self.target = named_hosts.folder_of_lists(self.environ) / "lab"
        self.parent = self.target.parent

    def use(self) -> str:
        (host,) = named_hosts.hosts_of_list("lab", self.environ) or ()
        return host.name


class ProjectFile(Row):
    reads = True

    def make(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.target = self.parent / project.NAME
        self.target.write_text(GOOD)

    def use(self) -> str:
        found = project.read_trusted(self.target, lambda text: None)
        if found is None:
            raise ConfigError("it is not used")
        return found


Make = Callable[[Path, pytest.MonkeyPatch], Row]
ROWS: Dict[str, Make] = {
    "key file": KeyFile, "new key file": NewKey, "notice": Notice, "notice, written": NoticeOfRank0,
    "package": ShippedPackage,
    "shipped files": ShippedFiles, "wheels": Wheels, "fetched files": Fetched, "flight records": Records,
    "temporary records": TemporaryRecords, "output of ranks": Output, "named files": Named,
    "list of hosts": HostList, "project file": ProjectFile,
}  # fmt: skip
"""By name."""
