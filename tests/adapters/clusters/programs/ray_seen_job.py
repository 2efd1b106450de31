"""A job on a real Ray of this machine while another user looks at all that it can read."""

from __future__ import annotations

import subprocess
import sys

import functions
import ray
from functions import write

from ringcomm._adapter import placed
from ringcomm.ray import RayExecutor

keys = []
make_bytes = placed.secrets.token_bytes


def remember(count: int) -> bytes:
    """As secrets.token_bytes, and keeps keys."""
    keys.append(make_bytes(count))
    return keys[-1]


placed.secrets.token_bytes = remember


def main() -> None:
    """``ray_seen_job.py RESULT PROGRAM``: the program is the other user's."""
    context = ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=120), num_workers=2)
    executor.start()
    first = executor.run(functions.describe, args=[1.0])
    session = ray._private.worker._global_node.get_session_dir_path()
    looks = [sys.executable, "-c", sys.argv[2], "127.0.0.1", session, "/dev/shm"]
    seen = subprocess.run(looks, stdout=subprocess.PIPE, check=True, timeout=120).stdout
    whole = [key for key in keys if len(key) == 32]
    facts = {
        "found": [key.hex() for key in whole if key in seen or key.hex().encode() in seen],
        "keys": len(whole), "first": first, "bytes": len(seen),
        "looked": b"cmdline: " in seen and session.encode() in seen,
        "again": executor.run(functions.describe, args=[1.0]), "address": context.address_info["address"],
    }  # fmt: skip
    executor.shutdown()
    write(facts)


if __name__ == "__main__":
    main()
