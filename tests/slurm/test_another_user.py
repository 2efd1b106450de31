"""Another user has a shell on a node while a job runs there: what it sees, and what it can do."""

from __future__ import annotations

import re
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

import pytest

from tests.hosts.netlab import Lab, wait_for
from tests.slurm.cluster import Slurm
from tests.slurm.test_slurm import MEMBER, await_state, await_text, batch, places
from tests.support.another_user import KNOCKS, LOOKS, OTHER_USER, become

PROGRAM = f"""
import os, runpy, sys
from ringcomm.rendezvous import embedded as launched

def keep(text):
    with open(os.open(sys.argv.pop(), os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
        file.write(text)

publish = launched.FileNotice.publish
launched.FileNotice.publish = lambda self, text: (keep(text), publish(self, text))
if "RINGCOMM_KEY_FD" in os.environ:
    keep(os.pread(int(os.environ["RINGCOMM_KEY_FD"]), 65536, 0).decode())
sys.argv[0] = {str(MEMBER)!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""

@contextmanager
def open_to_all(folder: Path) -> Iterator[None]:
    """As the directories of an installed Slurm: others may enter them, and what is below has its own mode."""
    changed = []
    for path in (folder, *folder.parents):
        mode = path.stat().st_mode & 0o7777
        if not mode & 0o001:
            path.chmod(mode | 0o055)
            changed.append((path, mode))
    try:
        yield
    finally:
        for path, mode in changed:
            path.chmod(mode)


@pytest.mark.parametrize("launcher", ["ringrun", "srun"])
def test_another_user_of_a_node_finds_no_key_and_disturbs_nothing(
    slurm: Slurm, slurm_lab: Lab, launcher: str
) -> None:
    program, go, evidence = (slurm.folder / f"{launcher}-{name}" for name in ("program.py", "go", "evidence"))
    program.write_text(PROGRAM)
    job, out = batch(slurm, f"{launcher} {'' if launcher == 'ringrun' else 'python '}{program} until {go} "
                     f"{evidence}-$SLURM_PROCID", "-N2", "-n4")  # fmt: skip
    await_text(out, "started", 4)
    address = slurm_lab.addresses("jetson1")[0]
    places_to_look = [slurm.folder, "/dev/shm", "/run", "/var/spool", "/var/lib/slurm"]
    looks = [sys.executable, "-c", become(OTHER_USER) + LOOKS + KNOCKS, address, *map(str, places_to_look)]
    with open_to_all(slurm.folder):
        seen = slurm_lab.run("jetson1", looks, text=False).stdout
        enter = ["setpriv", f"--reuid={OTHER_USER}", "--clear-groups", "srun", f"--jobid={job}", "--overlap"]
        entered = slurm_lab.run("jetson1", [*enter, "true"], env=slurm.environ(), check=False)
    go.touch()
    await_state(slurm, job, "COMPLETED", "FAILED")
    assert [host for host, _ in places(out.read_text()).values()] == ["jetson1"] * 3 + ["jetson2"]
    texts = "".join(path.read_text() for path in slurm.folder.glob(f"{launcher}-evidence-*"))
    (digits,) = set(re.findall(r"\b[0-9a-f]{64}\b", texts))
    assert digits.encode() not in seen and bytes.fromhex(digits) not in seen
    assert b"cmdline: " in seen and program.name.encode() in seen and re.search(rb"\nsaw \d+ ports", seen)
    assert entered.returncode != 0, "Slurm itself lets no other user into the job"
    wait_for(lambda: state_is_clean(slurm), 30, "the end of the notice")


def test_a_job_that_encrypts_says_that_srun_does_not(slurm: Slurm) -> None:
    done = slurm.run("salloc", "-N2", "-n2", "ringrun", "--encrypt", MEMBER)
    assert len(places(done.stdout)) == 2
    assert "by srun, which does not encrypt it" in done.stderr and "--via ssh" in done.stderr


def state_is_clean(slurm: Slurm) -> bool:
    """Nothing with a key is left."""
    folder = slurm.folder / ".ringcomm"
    return not folder.exists() or list(folder.iterdir()) == []
