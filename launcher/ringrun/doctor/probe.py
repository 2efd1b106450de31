"""The program of one host for ``ringrun doctor``: facts, listening, dialling, measuring. Runs on the host.

Standard library only: :mod:`ringrun.doctor.hosts` sends this file. After :data:`MARKER`, each line on stdin
is a command as JSON, and each line on stdout the answer to it. Peers are served only if they send the token
of this run, which comes over stdin. The program ends when stdin does.
"""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import struct
import sys
import threading
import time
from typing import Any, Dict, List, Optional, Tuple

from ringrun.doctor import facts

MARKER = "ringrun-doctor/1"
PORTS = 3
DIAL_S = 1.5
PINGS, PING_PAUSE_S = 30, 0.005
PING, SINK = b"p", b"s"
PIECE = bytes(1 << 18)
_NUMBERS = struct.Struct("!Qd")  # bytes, seconds


class Server:
    """Answers the peers of this run on some free ports.

    Args:
        token: 16 bytes that every peer of this run sends first.
        index: this host's number, which every peer is told.
    """

    def __init__(self, token: bytes, index: int) -> None:
        self._token, self._index = token, index
        self.ports: List[int] = []
        self.datagram_port = 0
        for _ in range(PORTS):
            listener = _listener(socket.SOCK_STREAM)
            listener.listen(64)
            self.ports.append(listener.getsockname()[1])
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        echo = _listener(socket.SOCK_DGRAM)
        self.datagram_port = echo.getsockname()[1]
        threading.Thread(target=self._echo, args=(echo,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            link, _ = listener.accept()
            threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        try:
            with link:
                link.settimeout(5.0)
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if read_exactly(link, 16) != self._token:
                    return
                link.sendall(bytes([self._index]))
                while True:
                    command = link.recv(1)
                    if command == PING:
                        link.sendall(struct.pack("!d", time.time()))
                    elif command == SINK:
                        link.sendall(_NUMBERS.pack(*_drain(link)))
                    else:
                        return
        except OSError:
            return  # the peer sees the end of the stream

    def _echo(self, echo: socket.socket) -> None:
        while True:
            data, sender = echo.recvfrom(65536)
            if data[:16] == self._token:
                try:
                    echo.sendto(data[:32], sender)
                except OSError:
                    continue


def _listener(kind: int) -> socket.socket:
    """A socket on a free port of all addresses, IPv4 and IPv6 where there is both."""
    if socket.has_ipv6:
        try:
            found = socket.socket(socket.AF_INET6, kind)
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            found.bind(("::", 0))
            return found
        except OSError:
            pass  # IPv6 is switched off
    found = socket.socket(socket.AF_INET, kind)
    found.bind(("0.0.0.0", 0))
    return found


def _drain(link: socket.socket) -> Tuple[int, float]:
    """Receive until a piece ends with a 1; the bytes and the seconds from the first to the last."""
    buffer = bytearray(1 << 18)
    total, started = 0, 0.0
    while True:
        count = link.recv_into(buffer)
        if not count:
            return total, time.monotonic() - started
        started = started or time.monotonic()
        total += count
        if buffer[count - 1] == 1:
            return total, time.monotonic() - started


def read_exactly(link: socket.socket, count: int) -> bytes:
    """Receive this many bytes.

    Raises:
        OSError: the stream has ended before.
    """
    data = b""
    while len(data) < count:
        piece = link.recv(count - len(data))
        if not piece:
            raise ConnectionResetError(errno.ECONNRESET, "the stream has ended")
        data += piece
    return data


class Dialer:
    """Dials the servers of other hosts.

    Args:
        token: this run's.
    """

    def __init__(self, token: bytes) -> None:
        self._token = token

    def open(self, address: str, port: int, limit_s: float) -> Tuple[socket.socket, int]:
        """A connection to a server, and the number of the host that answered.

        Raises:
            OSError: there is no connection, or another program answers.
        """
        link = socket.create_connection((address, port), limit_s)
        try:
            link.settimeout(limit_s)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.sendall(self._token)
            return link, read_exactly(link, 1)[0]
        except OSError:
            link.close()
            raise

    def try_all(self, targets: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
        """Dial all targets at the same time.

        Args:
            targets: ``host``, ``address``, ``port``, ``datagram_port`` and ``mtu`` of each.
        """
        results: List[Dict[str, Any]] = [{} for _ in targets]
        threads = []
        for target, result in zip(targets, results):
            thread = threading.Thread(target=self._try, args=(target, result), daemon=True)
            thread.start()
            threads.append(thread)
        until = time.monotonic() + 2 * DIAL_S
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        return [dict(result) or {"error": "timeout"} for result in results]

    def _try(self, target: Dict[str, Any], result: Dict[str, Any]) -> None:
        try:
            link, answered = self.open(target["address"], target["port"], DIAL_S)
        except OSError as problem:
            result["error"] = _error_name(problem)
            return
        with link:
            try:
                trips, skews = self._ping(link)
            except OSError as problem:
                result["error"] = _error_name(problem)
                return
            source = link.getsockname()[0]
        best = min(range(len(trips)), key=trips.__getitem__)
        result.update(
            answered=answered, source=source.replace("::ffff:", ""), skew_s=skews[best],
            rtt_ms=[round(trip * 1000, 3) for trip in sorted(trips)],
            datagrams=self._datagrams(target),
        )  # fmt: skip

    def _ping(self, link: socket.socket) -> Tuple[List[float], List[float]]:
        trips, skews = [], []
        for _ in range(PINGS):
            before = time.time()
            started = time.monotonic()
            link.sendall(PING)
            (there,) = struct.unpack("!d", read_exactly(link, 8))
            trip = time.monotonic() - started
            trips.append(trip)
            skews.append(there - (before + trip / 2))
            time.sleep(PING_PAUSE_S)
        return trips, skews

    def _datagrams(self, target: Dict[str, Any]) -> Optional[List[bool]]:
        """Whether a small and a full-sized datagram come back, with fragmentation forbidden."""
        if ":" in target["address"] or not target.get("mtu"):
            return None
        arrived = []
        for size in (200, target["mtu"] - 28):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.setsockopt(socket.IPPROTO_IP, 10, 2)  # IP_MTU_DISCOVER, IP_PMTUDISC_DO
                probe.connect((target["address"], target["datagram_port"]))
                arrived.append(_comes_back(probe, self._token + bytes(size - 16)))
        return arrived

    def stream(self, target: Dict[str, Any], seconds: float) -> Dict[str, Any]:
        """Send for some seconds; the bytes per second that arrived."""
        try:
            link, _ = self.open(target["address"], target["port"], DIAL_S)
            with link:
                link.sendall(SINK)
                until = time.monotonic() + seconds
                link.settimeout(seconds + 2.0)
                while time.monotonic() < until:
                    link.sendall(PIECE)
                link.sendall(b"\1")
                total, elapsed = _NUMBERS.unpack(read_exactly(link, _NUMBERS.size))
        except OSError as problem:
            return {"error": _error_name(problem)}
        return {"bytes_per_s": total / max(elapsed, 1e-6), "bytes": total}


def _comes_back(probe: socket.socket, data: bytes) -> bool:
    for _ in range(3):
        try:
            probe.send(data)
        except OSError as problem:
            if problem.errno == errno.EMSGSIZE:
                return False
        if select.select([probe], [], [], 0.2)[0]:
            try:
                if probe.recv(64)[:16] == data[:16]:
                    return True
            except OSError:
                continue
    return False


def _error_name(problem: OSError) -> str:
    if isinstance(problem, socket.timeout):
        return "timeout"
    return errno.errorcode.get(problem.errno or 0, str(problem))


def main() -> None:
    """Answer commands until stdin ends."""
    dialer, server = Dialer(b""), None
    sys.stdout.write("\n" + MARKER + "\n")
    sys.stdout.flush()
    stream = os.fdopen(0, "rb", buffering=1 << 16)
    for line in stream:
        command = json.loads(line.decode())
        if command["do"] == "facts":
            cwd = os.path.expanduser(command["cwd"])  # noqa: PTH111
            answer: Any = facts.collect(cwd)
        elif command["do"] == "listen":
            token = bytes.fromhex(command["token"])
            server, dialer = Server(token, command["index"]), Dialer(token)
            answer = {"ports": server.ports, "datagram_port": server.datagram_port}
        elif command["do"] == "dial":
            answer = dialer.try_all(command["targets"])
        else:
            answer = dialer.stream(command["target"], command["seconds"])
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
