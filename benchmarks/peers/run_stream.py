"""A plain TCP stream between two hosts, both ways at once: what a library could reach at most.

python run_stream.py FILE listen ADDRESS BYTES        writes the port to FILE
python run_stream.py FILE connect ADDRESS BYTES       prints bytes per second in each direction
"""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from limits import both_directions

GRACE_S = 20.0


def main() -> None:
    path, role, address, total = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    if role == "listen":
        with socket.create_server((address, 0)) as listener:
            listener.settimeout(GRACE_S)
            ready = path.with_suffix(".new")
            ready.write_text(str(listener.getsockname()[1]))
            ready.rename(path)
            sock, _ = listener.accept()
    else:
        deadline = time.monotonic() + GRACE_S
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        sock = socket.create_connection((address, int(path.read_text())), GRACE_S)
    with sock:
        rate = both_directions(sock, total)
        if role == "connect":
            print(rate)


if __name__ == "__main__":
    main()
