"""The files that a direct all-reduce goes through, whose number is in docs/architecture.md."""

from __future__ import annotations

from pathlib import Path

from tests.proc.test_ringrun_support import ringrun

PROGRAM = """
import sys
import numpy as np
import ringcomm as rc

seen = set()

def called(frame, event, argument):
    code = frame.f_code
    # Bodies of modules and classes are not optimized: they run at the import.
    if event == "call" and code.co_flags & 1 and "/ringcomm/" in code.co_filename:
        seen.add(code.co_filename.rpartition("/ringcomm/")[2])

rc.init()
x = np.ones(1 << 20, np.float32)
for _ in range(2):
    rc.allreduce_(x)
rc.barrier()
sys.setprofile(called)
rc.allreduce_(x)
sys.setprofile(None)
if rc.rank() == 0:
    open("files", "w").write("\\n".join(sorted(seen)))
"""

DIRECT = {
    "arrays/operands.py", "calls/collectives.py", "calls/direct.py", "clock.py",
    "collective/call_errors.py", "collective/call_history.py", "collective/call_runner.py",
    "collective/call_sites.py", "collective/drive.py", "collective/execute.py", "collective/flows.py",
    "collective/headers.py", "collective/reduce.py", "collective/runner.py",
    "job/default_context.py", "ops.py", "transport/base.py", "transport/tcp.py",
    "wire/frames.py",
}  # fmt: skip
NOW_AND_THEN = {"collective/part.py", "collective/progress.py", "rendezvous/control.py", "transport/pace.py"}
"""Of a call that waits, in which the connections are watched and the pace of a link is adjusted."""


def test_a_direct_all_reduce(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    done = ringrun("-np", "2", "--transport", "tcp", "train.py", cwd=tmp_path)
    assert done.process.returncode == 0, done.err
    found = set((tmp_path / "files").read_text().split())
    assert DIRECT <= found <= DIRECT | NOW_AND_THEN
