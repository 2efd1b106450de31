"""Sends garbage to ports; run as a program of its own so that it competes fairly.

Usage: python garbage.py SEED COUNT PER_SECOND PORT...

It does not wait: where the system keeps no more connections waiting, it goes on with the next.
"""

from __future__ import annotations

import random
import socket
import ssl
import sys
import time
from collections import deque
from typing import List

HALF_A_PRELUDE = b"ringcomm\x00\x01\x00\x01"
FORGED_PRELUDE = HALF_A_PRELUDE + bytes(60)
HALF_AN_ADMISSION = b"\x02rct" + bytes(8)
FORGED_ADMISSION = HALF_AN_ADMISSION + bytes(24)
KEPT_OPEN = 300


def hello() -> bytes:
    """Return what TLS starts with; answering it costs more than anything else."""
    sent = ssl.MemoryBIO()
    try:
        ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), sent, server_hostname="a").do_handshake()
    except ssl.SSLWantReadError:
        pass
    return sent.read()


HELLO = hello()


def some_bytes(rng: random.Random) -> bytes:
    """Return what an unauthenticated peer might send first; nothing, too."""
    kind = rng.randrange(9)
    if kind == 0:
        return bytes(rng.getrandbits(8) for _ in range(rng.randrange(1, 400)))
    return [
        b"",
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        HALF_A_PRELUDE,
        FORGED_PRELUDE,
        b"\x16\x03\x01\x02",
        HELLO,
        HALF_AN_ADMISSION,
        FORGED_ADMISSION,
    ][kind - 1]


def main(seed: int, count: int, per_s: float, ports: List[int]) -> None:
    """Ask for ``count`` connections, leaving some of them open for a while."""
    rng = random.Random(seed)
    still_open: deque[socket.socket] = deque()
    refused, began_s = 0, time.monotonic()
    for number in range(count):
        if number == min(500, count // 2):
            print("it has begun", flush=True)
        time.sleep(max(0.0, began_s + number / per_s - time.monotonic()))
        sock = socket.socket()
        sock.setblocking(False)
        sock.connect_ex(("127.0.0.1", ports[number % len(ports)]))
        try:
            sock.send(some_bytes(rng))
        except OSError:
            refused += 1
        if rng.random() < 0.5:
            sock.close()
        else:
            still_open.append(sock)
        if still_open:
            # And some of them go on, a byte at a time.
            try:
                rng.choice(still_open).send(b"r")
            except OSError:
                pass  # it has been sent away
        while len(still_open) > KEPT_OPEN:
            still_open.popleft().close()
    print(f"{count - refused} connections, {refused} refused")
    while still_open:
        still_open.popleft().close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), [int(port) for port in sys.argv[4:]])
