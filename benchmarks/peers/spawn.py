"""Start the ranks of a peer that brings no launcher, with RANK, WORLD_SIZE and STORE set.

    python spawn.py STORE '[["command", "of", "rank 0"], ["command", "of", "rank 1"]]'

When one fails the others are ended, and the exit code is the first bad one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import List

END_S = 5.0


def main() -> int:
    store, commands = sys.argv[1], json.loads(sys.argv[2])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    running: List[subprocess.Popen[bytes]] = []
    try:
        for rank, command in enumerate(commands):
            own = {"RANK": str(rank), "WORLD_SIZE": str(len(commands)), "STORE": store}
            running.append(subprocess.Popen(command, env={**os.environ, **own}))
        while True:
            codes = [process.poll() for process in running]
            bad = [code for code in codes if code]
            if bad or None not in codes:
                return bad[0] & 255 if bad else 0
            time.sleep(0.02)
    finally:
        _end(running)


def _end(running: List[subprocess.Popen[bytes]]) -> None:
    for process in running:
        process.terminate()
    deadline = time.monotonic() + END_S
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
