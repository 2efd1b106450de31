"""A host discovery script that fails in every way after its first success: its last hosts remain."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import List, Tuple

import pytest

from ringrun.job.discovery import Discovery, ScriptError, run_script
from tests.hosts.netlab import wait_for
from tests.proc.test_elastic_launcher import script

LIMIT_S = 60.0
FAULTS = {
    "exit 6": "ended with exit code 6",
    "echo 'a b; rm -rf'": "line 1 of the discovery script's output",
    "echo one:2; echo one:3": "one has 3 slots here and 2 in an earlier line",
    "seq -f host%g 1 1100": "more than 1024 hosts",
    "head -c 2000000 /dev/zero": "has written more than 1048576 bytes",
    r"printf '\377'": "has written bytes that are not text in UTF-8",
    "kill -9 $$": "ended with exit code",
    "rm $0; exit 9": "ended with exit code 9",
    "": "ended with exit code 127",  # there is no script any more
}


def test_no_fault_after_the_first_success_ends_the_job(tmp_path: Path) -> None:
    """Each fault is reported once, and no host of the last valid list is lost by it."""
    count, path = tmp_path / "count", tmp_path / "hosts"
    turns = "".join(f"{turn}) {fault} ;;\n" for turn, fault in enumerate(FAULTS, 2))
    script(path, f"echo >> {count}\ncase $(wc -l < {count} | tr -d ' ') in\n{turns}*) echo one:2 ;;\nesac")
    lists: List[Tuple[str, ...]] = []
    lines: List[str] = []
    failures: List[str] = []
    gone, again = threading.Event(), threading.Event()

    def warned(line: str) -> None:
        lines.append(line)
        if len(lines) >= len(FAULTS):
            (again if "works again" in line else gone).set()

    job = Discovery(
        str(path), 1, lambda hosts: lists.append(tuple(item.target for item in hosts)), warned,
        failures.append, interval_s=0.01,
    )  # fmt: skip
    job.start()
    try:
        assert gone.wait(LIMIT_S), lines
        Path(script(tmp_path / "next", "echo one:2; echo two:1")).replace(path)
        assert again.wait(LIMIT_S), lines
    finally:
        job.stop()
    assert failures == []
    assert set(lists) == {("one",), ("one", "two")} and lists[0] == ("one",)
    assert len(lines) == len(FAULTS) + 1 and lines[-1] == "the discovery script works again"
    for line, part in zip(lines, FAULTS.values()):
        assert line.startswith("the discovery script failed; its last hosts remain: ") and part in line, line


@pytest.mark.full
def test_a_script_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    children = tmp_path / "children"
    path = script(tmp_path / "hosts", f"sleep 1000 & echo $! > {children}; wait")
    with pytest.raises(ScriptError, match="has not ended within 3 s"):
        run_script(path, 3.0, threading.Event())
    child = Path(f"/proc/{children.read_text().strip()}/stat")
    wait_for(lambda: has_ended(child), LIMIT_S, "the end of the script's child")


def has_ended(child: Path) -> bool:
    """Return whether a process has ended, from its file ``stat``."""
    try:
        return child.read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
