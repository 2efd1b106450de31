"""Each file and folder that holds code, keys, records or results, prepared by another user in every way."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Callable, Dict, Iterator, List

import pytest

from ringcomm.errors import ConfigError, StartTimeoutError
from ringrun.agent import shipped
from tests.integration.storage.prepared import EVIL, GOOD, ROWS, Row

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
ROOT = Path(__file__).resolve().parents[3]
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
    "new key file": {**READ, "full disk": "refused"}, "agent program": REPLACED, "package": WRITTEN,
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
    if row.code and row.__class__.__name__ != "AgentProgram":
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
