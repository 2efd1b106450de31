"""Jobs without ringrun: processes that find each other through the environment."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from typing import List, Tuple

from tests.proc.test_ringrun_support import LIMIT_S, SOURCES
from tests.support.service import free_port


def run_plain(program: str, size: int, **environment: str) -> List[Tuple[int, str]]:
    """Run a program on so many ranks of this host; exit code and output of each, in no order of ranks.

    TEST_NUMBER counts the processes, for programs that do without ``rc.init()``.
    """
    port = free_port()
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RINGCOMM_")},
        "PYTHONPATH": SOURCES,
        "RINGCOMM_SIZE": str(size),
        "RINGCOMM_RENDEZVOUS": f"127.0.0.1:{port}",
        "RINGCOMM_KEY": secrets.token_hex(32),
        **environment,
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program], env={**env, "TEST_NUMBER": str(number)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for number in range(size)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, text) for rank, text in zip(ranks, outputs)]
