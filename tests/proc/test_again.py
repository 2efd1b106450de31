"""Without ringrun: a job ends and starts again in the same processes, and so does its rendezvous."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys

from tests.proc.test_ringrun_support import LIMIT_S, SOURCES

PROGRAM = """
import numpy as np
import ringcomm as rc
for generation in range(5):
    rc.init()
    assert rc.allreduce(np.full(3, 1.0), rc.Sum)[0] == 3
    rc.shutdown()  # The rank that serves the rendezvous may be the first here, or the last.
"""


def test_shutdown_and_init() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RINGCOMM_")},
        "PYTHONPATH": SOURCES,
        "RINGCOMM_SIZE": "3",
        "RINGCOMM_RENDEZVOUS": f"127.0.0.1:{port}",
        "RINGCOMM_KEY": secrets.token_hex(32),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM], env=env,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for _ in range(3)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * 3, said
