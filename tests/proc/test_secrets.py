"""A running job is searched for its key and its certificate's private key: neither is found."""

from __future__ import annotations

import base64
import os
import re
import resource
import signal
import stat
import subprocess
import time
from pathlib import Path
from typing import Dict, Iterable, List

import pytest

from tests.proc.test_ringrun_support import Launched
from tests.support.another_user import OTHER_USER

PROGRAM = """
import logging, os, pathlib, sys, time
import numpy as np
import ringcomm as rc

logging.basicConfig(level=logging.DEBUG)
key = os.pread(int(os.environ["RINGCOMM_KEY_FD"]), 65536, 0)  # as init() does
rc.init()
rc.allreduce(np.ones(100_000), name="x")
print("all is well", rc.rank(), repr(os.environ), flush=True)
if rc.rank() == 0:
    pathlib.Path(sys.argv[1]).write_bytes(key)
while not pathlib.Path(sys.argv[2]).exists():
    time.sleep(0.02)
rc.allreduce(np.ones(3))
"""


def traces_of(text: bytes) -> Dict[str, bytes]:
    """Return what the key and the private key might look like somewhere."""
    digits = text.split()[0]
    key = bytes.fromhex(digits.decode())
    found = {"key, in hex": digits, "key": key, "key, in base64": base64.b64encode(key).rstrip(b"=")}
    private = re.search(rb"-----BEGIN PRIVATE KEY-----\n(.*?)-----END", text, re.S)
    if private:
        body = base64.b64decode(private.group(1))
        found["private key, PEM"] = private.group(1).split()[0]
        found["private key"] = body[36:68]  # the number itself, in the middle of the structure
        found["private key, in hex"] = body[36:68].hex().encode()
    return {**found, "key, in upper case": digits.upper()}


def contents(folders: Iterable[Path]) -> Dict[str, bytes]:
    """Every file that can be read, by its path."""
    return {
        str(path): path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()
    }


def shown_by(pids: Iterable[int]) -> Dict[str, bytes]:
    """Return what the system shows of processes: command lines, environments, and what ps makes of them."""
    found = {}
    for pid in pids:
        for name in ("cmdline", "environ", "comm", "maps", "status"):
            found[f"/proc/{pid}/{name}"] = Path(f"/proc/{pid}/{name}").read_bytes()
    for options in ("auxeww", "-efww"):
        found[f"ps {options}"] = subprocess.run(["ps", options], capture_output=True, check=True).stdout
    return found


@pytest.mark.parametrize("options", [[], ["--encrypt", "--transport", "tcp"]], ids=["plain", "encrypted"])
def test_no_other_process_finds_the_key(tmp_path: Path, options: List[str]) -> None:
    work, evidence, done = tmp_path / "work", tmp_path / "evidence", tmp_path / "done"
    temporary = tmp_path / "tmp"
    for folder in (work, temporary):
        folder.mkdir()
    (work / "train.py").write_text(PROGRAM)
    job = Launched(
        "-np", "2", "--verbose", "--output-dir", "logs", "--timeline", "trace.json", *options,
        "train.py", str(evidence), str(done), cwd=work, env={"TMPDIR": str(temporary)},
    )  # fmt: skip
    try:
        until = time.monotonic() + 30.0
        while not evidence.exists() or not evidence.read_bytes():
            assert job.process.poll() is None and time.monotonic() < until
            time.sleep(0.02)
        folders = [work, temporary, Path("/dev/shm")]
        seen = {**shown_by(job.pids()), **contents(folders)}
    finally:
        done.touch()
    assert job.finish() == 0, job.err
    assert "all is well 1" in job.out
    seen.update(contents(folders), stdout=job.out.encode(), stderr=job.err.encode())
    traces = traces_of(evidence.read_bytes())
    assert ("private key" in traces) == bool(options)
    assert [
        (what, where) for what, trace in traces.items() for where, text in seen.items() if trace in text
    ] == []
    assert any("RINGCOMM_KEY_FD" in text.decode("utf-8", "replace") for text in seen.values())
    assert len([name for name in seen if name.endswith("environ")]) >= 4, "launcher, guard, agent, ranks"


FAILS = """
import os, pathlib, sys, time
import numpy as np
import ringcomm as rc

rc.init()
rc.allreduce(np.ones(3))
pathlib.Path(sys.argv[1], str(rc.rank())).write_bytes(os.environb[b"MY_TOKEN"])
while not pathlib.Path(sys.argv[1], "done").exists():
    time.sleep(0.02)
if rc.rank() == 1:
    raise ValueError("failed")
rc.allreduce(np.ones(3))
"""


def test_ranks_elsewhere_get_the_shells_variables_byte_for_byte_and_nothing_else_shows_them(
    tmp_path: Path,
) -> None:
    """The other host's login has an ASCII locale. A rank fails, so that there are records."""
    secret = b"hunter2-of-this-test"
    value = b"%s\n'\"$HOME`x`\\ \xc3\xa9 \xff" % secret + b"x" * 100_000
    work, ranks = tmp_path / "work", tmp_path / "ranks"
    for folder in (work, ranks):
        folder.mkdir()
    (work / "train.py").write_text(FAILS)
    login = "env -u MY_TOKEN LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 AT={host}"
    job = Launched(
        "-np", "2", "-H", "localhost,b", "--via", login, "--verbose", "--output-dir", "logs",
        "train.py", str(ranks), cwd=work, env={"MY_TOKEN": os.fsdecode(value)},
    )  # fmt: skip
    try:
        until = time.monotonic() + 30.0
        while len(list(ranks.iterdir())) < 2:
            assert job.process.poll() is None and time.monotonic() < until, job.finish()
            time.sleep(0.02)
        lines = {path: path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")}
        environments = [Path(f"/proc/{pid}/environ").read_bytes() for pid in job.pids()]
        agent = [text for text in environments if b"\0AT=b\0" in text and b"\0RINGCOMM_SLOT=" not in text]
    finally:
        (ranks / "done").touch()
    assert job.finish() != 0
    assert [(ranks / rank).read_bytes() == value for rank in "01"] == [True, True]
    seen = {**contents([work, job.records, job.temporary]), "out": job.out.encode(), "err": job.err.encode()}
    assert any("flight" in path for path in seen) and len(agent) >= 2, "records; agent and guard"
    assert [where for where, text in {**seen, **lines}.items() if secret in text] == []
    assert not any(secret in text for text in agent)


DUMPS = """
import os
import numpy as np
import ringcomm as rc

rc.init()
rc.allreduce(np.ones(3))
os.umask(0)
os.abort()
"""


def no_core_here() -> str:
    """Why no core file would appear in the current directory; "" if one would."""
    pattern = Path("/proc/sys/kernel/core_pattern")
    if not pattern.exists() or pattern.read_text().startswith(("|", "/")):
        return "the system writes core files elsewhere"
    return "" if resource.getrlimit(resource.RLIMIT_CORE)[1] else "this user may have no core files"


@pytest.mark.full
@pytest.mark.skipif(bool(no_core_here()), reason=no_core_here())
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's files")
@pytest.mark.cases(1)
@pytest.mark.parametrize("prepared", ["nothing", "file", "link", "FIFO"])
def test_the_core_of_a_rank_is_for_its_user_alone(tmp_path: Path, prepared: str) -> None:
    """It may contain the key. Linux makes a new file with mode 0600, or none where another user's is."""
    work, core, target = tmp_path / "work", tmp_path / "work" / "core", tmp_path / "target"
    work.mkdir()
    work.chmod(0o777)
    if prepared == "link":
        core.symlink_to(target)
    elif prepared == "FIFO":
        os.mkfifo(core)
    elif prepared == "file":
        core.touch()
        core.chmod(0o666)
    if prepared != "nothing":
        os.chown(core, OTHER_USER, OTHER_USER, follow_symlinks=False)
    (tmp_path / "dumps.py").write_text(DUMPS)
    limits = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (limits[1], limits[1]))
    try:
        job = Launched("-np", "1", str(tmp_path / "dumps.py"), cwd=work)
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, limits)
    assert job.finish() == 128 + signal.SIGABRT, job.err
    found = [path.lstat() for path in work.iterdir() if path.name.startswith("core")]
    assert found and not target.exists()
    for facts in found:
        if facts.st_uid == os.geteuid():
            assert stat.S_ISREG(facts.st_mode) and stat.S_IMODE(facts.st_mode) == 0o600
        else:
            assert facts.st_size < 100, "the other user's file stays as it was"
