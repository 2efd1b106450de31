"""The files and calls that a direct all-reduce goes through, whose numbers are in docs/architecture.md."""

from __future__ import annotations

from pathlib import Path

from tests.proc.test_ringrun_support import ringrun

PROGRAM = """
import sys
import numpy as np
import ringcomm as rc

seen, count = set(), 0

def called(frame, event, argument):
    code = frame.f_code
    # Bodies of modules and classes are not optimized: they run at the import.
    if event == "call" and code.co_flags & 1 and "/ringcomm/" in code.co_filename:
        seen.add(code.co_filename.rpartition("/ringcomm/")[2])
        global count
        count += 1

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

short, fewest = x[:2], 1000
for _ in range(200):
    rc.barrier()
    count = 0
    sys.setprofile(called)
    rc.allreduce_(short)
    sys.setprofile(None)
    fewest = min(fewest, count)  # of calls in which the other rank was not late
if rc.rank() == 0:
    open("calls", "w").write(str(fewest))
"""

DIRECT = {
    "arrays/operands.py", "calls/collectives.py", "calls/direct.py", "collective/execute.py",
    "collective/observe.py", "collective/reduce.py", "collective/runner.py", "job/default_context.py",
    "transport/tcp.py", "wire/frames.py",
}  # fmt: skip
NOW_AND_THEN = {"clock.py", "rendezvous/control.py", "transport/base.py", "transport/pace.py"}
"""Of a call that waits, in which the connections are watched and the pace of a link is adjusted."""


def test_a_direct_all_reduce(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    done = ringrun("-np", "2", "--transport", "tcp", "train.py", cwd=tmp_path)
    assert done.process.returncode == 0, done.err
    found = set((tmp_path / "files").read_text().split())
    assert DIRECT <= found <= DIRECT | NOW_AND_THEN
    assert int((tmp_path / "calls").read_text()) <= 36
