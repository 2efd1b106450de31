"""A cable with a delay and a rate, for a kernel without netem: a process carries frames between TAP devices.

    python -m tests.support.delay_line NETNS IFACE NETNS IFACE DELAY_MS MBIT_PER_S

makes a device in each network namespace, prints "ready", and carries what one sends to the other: at most so
many Mbit/s each way, each frame so many milliseconds late. A queue of 100 ms is in front, as in a router; a
frame that finds it full is lost. The devices go with the process.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from typing import Deque, List, Tuple

_TUNSETIFF, _TAP, _PLAIN = 0x400454CA, 0x0002, 0x1000
_NEW_NET = 0x40000000
_FRAME_BYTES = 65536
QUEUE_S = 0.1


def make_tap(netns: str, name: str) -> int:
    """Make a TAP device in a named network namespace; its descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{netns}", "rb") as namespace:
        if libc.setns(namespace.fileno(), _NEW_NET):
            raise OSError(ctypes.get_errno(), f"the namespace {netns} cannot be entered")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP | _PLAIN))
    return device


class Way:
    """One direction."""

    def __init__(self, source: int, sink: int, delay_s: float, byte_s: float) -> None:
        self.source, self._sink, self._delay_s, self._byte_s = source, sink, delay_s, byte_s
        self._free_s = 0.0
        self._travelling: Deque[Tuple[float, bytes]] = deque()

    def take(self, now_s: float) -> None:
        """Read the frames that wait in the device."""
        while True:
            try:
                frame = os.read(self.source, _FRAME_BYTES)
            except OSError:  # there is none, or the device is down
                return
            begin_s = max(now_s, self._free_s)
            if begin_s - now_s <= QUEUE_S:
                self._free_s = begin_s + len(frame) * self._byte_s
                self._travelling.append((self._free_s + self._delay_s, frame))

    def deliver(self, now_s: float) -> float:
        """Write the frames that have arrived; the seconds until the next one."""
        while self._travelling and self._travelling[0][0] <= now_s:
            try:
                os.write(self._sink, self._travelling.popleft()[1])
            except OSError:
                pass  # the device is down: the frame is lost
        return self._travelling[0][0] - now_s if self._travelling else 1.0


def main(one_netns: str, one: str, other_netns: str, other: str, delay_ms: str, mbit: str) -> None:
    """Carry frames until the process is ended."""
    taps = [make_tap(one_netns, one), make_tap(other_netns, other)]
    delay_s, byte_s = float(delay_ms) / 1e3, 8e-6 / float(mbit)
    ways: List[Way] = [Way(*pair, delay_s, byte_s) for pair in (taps, taps[::-1])]
    print("ready", flush=True)
    wait_s = 1.0
    while True:
        select.select(taps, [], [], max(0.0, wait_s))
        now_s = time.monotonic()
        for way in ways:
            way.take(now_s)
        wait_s = min(way.deliver(now_s) for way in ways)


if __name__ == "__main__":
    main(*sys.argv[1:])
