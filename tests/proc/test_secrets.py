"""A running job is searched for its key and its certificate's private key: neither is found."""

from __future__ import annotations

import base64
import re
import subprocess
import time
from pathlib import Path
from typing import Dict, Iterable, List

import pytest

from tests.proc.test_ringrun_support import Launched

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
    """What the key and the private key might look like somewhere."""
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
    """What the system shows of processes: command lines, environments, and what ps makes of them."""
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
