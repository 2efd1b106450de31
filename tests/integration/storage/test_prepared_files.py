"""Each file and folder that holds code, keys, records or results, prepared by another user in every way."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Dict, Iterator, List

import pytest

from ringcomm import newkey
from ringcomm.clock import Deadline
from ringcomm.configuration.membership import Launched
from ringcomm.errors import ConfigError, StartTimeoutError
from ringcomm.rendezvous.embedded import FileNotice
from ringcomm.storage.files import open_named
from ringcomm.storage.keys import read_key
from ringrun import project
from ringrun.agent import shipped
from ringrun.agent.shipped import JobFolder
from ringrun.diagnosis import records
from ringrun.job import files as contents
from ringrun.job.files import FetchedFiles, Package
from ringrun.job.launch import prepare
from ringrun.plan.options import Options
from ringrun.reach import named_hosts
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

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
OTHER_USER = 12345
REFUSALS = (ConfigError, StartTimeoutError, OSError)
KEEP = "keep"

REPLACED = dict.fromkeys(
    ["link", "hard link", "fifo", "foreign owner", "group-writable parent", "sticky parent",
     "swapped after the check", "full disk"], "good",
)  # fmt: skip
"""What another user has put there is replaced, or another place is taken."""
READ = {
    **REPLACED, "link": "refused", "hard link": "refused", "fifo": "refused", "foreign owner": "refused",
}  # fmt: skip
TRUSTED = {**READ, "group-writable parent": "refused", "sticky parent": "refused"}
WRITTEN = {**REPLACED, "full disk": "refused"}
EXPECTED: Dict[str, Dict[str, str]] = {
    "key file": READ, "notice": READ, "notice, written": WRITTEN,
    "new key file": {**READ, "full disk": "refused"}, "package": WRITTEN,
    "shipped files": WRITTEN, "wheels": WRITTEN, "fetched files": WRITTEN, "flight records": WRITTEN,
    "temporary records": {**WRITTEN, "group-writable parent": "refused"}, "output of ranks": WRITTEN,
    "list of hosts": TRUSTED, "project file": TRUSTED, "named files": {**READ, "full disk": "refused"},
}  # fmt: skip


@pytest.fixture
def base() -> Iterator[Path]:
    """A folder that other users can reach, not below the tests' own."""
    folder = Path(tempfile.mkdtemp(prefix="prepared-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    while shipped._held:  # a job holds the locks of its caches until its processes end
        os.close(shipped._held.popitem()[1])
    if os.path.ismount(folder):
        subprocess.run(["umount", str(folder)], check=True)
    shutil.rmtree(folder)


def as_other_user(call: Callable[[], object]) -> str:
    """Return what a call returns in a process of another user, or the name of its error's class."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(OTHER_USER)
            os.setuid(OTHER_USER)
            os.environ["HOME"] = "/nowhere"
            os.write(writer, str(call()).encode())
        except BaseException as problem:  # noqa: BLE001  the child must not return to pytest
            os.write(writer, type(problem).__name__.encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as told:
        text = told.read().decode()
    os.waitpid(child, 0)
    return text


def clear(target: Path) -> None:
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    elif os.path.lexists(target):
        target.unlink()


def trap(row: Row, name: str, precious: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepare the target of a row."""
    target = row.target
    if name == "group-writable parent":
        row.parent.chmod(0o775)
        return
    if name == "sticky parent":
        row.parent.chmod(0o1777)
        return
    if name == "swapped after the check":
        swap(row, precious, monkeypatch)
        return
    clear(target)
    if name == "link":
        target.symlink_to(precious)
    elif name == "hard link":
        target.parent.chmod(0o1777)
        os.link(precious, target)
        return
    elif name == "fifo":
        os.mkfifo(target, 0o666)
    elif name == "foreign owner" and row.__class__.__name__ == "ShippedPackage":
        target.mkdir()
        (target / "a.py").write_text(EVIL)
    elif name == "foreign owner":
        target.write_text(EVIL)
        target.chmod(0o666)
    os.chown(target, OTHER_USER, OTHER_USER, follow_symlinks=False)


def swap(row: Row, precious: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put something else there while it is used."""
    if row.code:
        assert as_other_user(lambda: row.target.rename(row.base / "gone")) == "PermissionError"
        return
    look, rename = os.fstat, os.rename
    wanted = row.target.stat().st_ino if row.target.exists() else -1

    def after_look(descriptor: int) -> os.stat_result:
        facts = look(descriptor)
        is_open = not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_PATH
        if facts.st_ino == wanted and is_open:
            clear(row.target)
            row.target.write_text(EVIL)
        return facts

    def before_rename(*names: str, **folders: int) -> None:
        if names[-1] == row.target.name and not row.target.exists():
            row.target.symlink_to(precious)
        rename(*names, **folders)

    if row.reads:
        monkeypatch.setattr(os, "fstat", after_look)
    else:
        monkeypatch.setattr(os, "rename", before_rename)


def outcome(row: Row) -> str:
    try:
        found = row.use()
    except REFUSALS:
        return "refused"
    assert found == GOOD, "what another user has made was used"
    return "good"


@pytest.mark.parametrize("name", sorted(REPLACED))
@pytest.mark.parametrize("which", sorted(ROWS))
def test_prepared(which: str, name: str, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "full disk":
        words = ["mount", "-t", "tmpfs", "-o", "size=512k,mode=755", "none", str(base)]
        done = subprocess.run(words, check=False)
        if done.returncode:
            pytest.skip("this environment mounts nothing")
    row = ROWS[which](base, monkeypatch)
    precious = base / "precious"
    precious.write_text(KEEP)
    precious.chmod(0o600)
    expected = EXPECTED[which][name]
    if name == "full disk":
        full(row, base)
        assert outcome(row) == expected
        assert partial_files(base) == []
    else:
        trap(row, name, precious, monkeypatch)
        assert outcome(row) == expected
    assert precious.read_text() == KEEP and precious.stat().st_mode & 0o777 == 0o600


def full(row: Row, base: Path) -> None:
    """Fill the file system to its last byte."""
    if row.code:
        clear(row.target)
    with open(base / "filler", "wb", buffering=0) as file:
        size = 1 << 16
        while size:
            try:
                size = min(size, file.write(bytes(size)) or 0)
            except OSError:
                size >>= 1


def partial_files(base: Path) -> List[Path]:
    """Files and folders that were left half made."""
    return [path for path in base.rglob(".*") if path.name.startswith(".")]
