"""``init()`` in a process that a rank has started."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile


def test_a_child_of_a_rank_is_told_what_it_is() -> None:
    ask = "from ringcomm.config import Membership\n"
    child = f"{ask}Membership.from_environment()"
    code = (
        f"import subprocess, sys\n{ask}"
        "assert Membership.from_environment() == Membership.from_environment()\n"
        f"sys.exit(subprocess.call([sys.executable, '-c', {child!r}]))"
    )
    with tempfile.TemporaryFile() as key:
        key.write(b"ab" * 32)
        key.flush()
        env = {
            **os.environ, "RINGCOMM_SIZE": "2", "RINGCOMM_RANK": "1", "RINGCOMM_RENDEZVOUS": "127.0.0.1:1",
            "RINGCOMM_KEY_FD": str(key.fileno()),
        }  # fmt: skip
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command,
            env=env,
            pass_fds=[key.fileno()],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert "is a child of a rank of the job (rank 1, process" in done.stderr, done.stderr
    assert '__name__ == "__main__"' in done.stderr
