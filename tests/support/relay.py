"""A process without the key that stands between two processes of a job: a TCP relay.

It passes the handshake on as it is, and may do what it likes with the control messages that follow.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import threading
from typing import Callable, List, Optional, Sequence, Tuple

from ringcomm.wire.auth import Claim, Initiator, Purpose, Responder, Session

_KEY = b"k" * 32
_CLAIM = Claim(Purpose.CONTROL, bytes(16))
_INITIATOR = Initiator(_KEY, _CLAIM)
_CHALLENGE = Responder(_KEY, bytes(16)).receive(_INITIATOR.greeting)
HANDSHAKE_BYTES = {
    "there": len(_INITIATOR.greeting) + len(_INITIATOR.receive(_CHALLENGE)),
    "back": len(_CHALLENGE),
}
"""How many bytes of the handshake travel in each direction: from the side that dialled, and back."""
TAG_BYTES = Session.TAG_BYTES
_LENGTH = struct.Struct("!I")

Frame = bytes
"""A control message as it travels: its length, its JSON and its tag."""
Change = Callable[[str, int, Frame], Sequence[Tuple[str, Frame]]]
"""(direction, how many came before it that way, frame): what to send instead, and in which direction."""


def content(frame: Frame) -> dict:
    """The content of a control message: without encryption, every relay can read it."""
    (length,) = _LENGTH.unpack_from(frame)
    return json.loads(frame[_LENGTH.size : _LENGTH.size + length])


def replaced(frame: Frame, message: dict) -> Frame:
    """The frame with another message in it, and the tag that was there."""
    (length,) = _LENGTH.unpack_from(frame)
    body = json.dumps(message).encode()
    return _LENGTH.pack(len(body)) + body + frame[_LENGTH.size + length :]


class Relay:
    """Listens, dials the target for each connection, and forwards its data: control messages through `change`
    (None: unchanged), the bytes after the handshake through `stream`. `came` counts connections.
    """

    def __init__(
        self,
        target: Tuple[str, int],
        change: Optional[Change] = None,
        stream: Callable[[bytes], bytes] = bytes,
        address: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.target = target
        self.change, self.stream = change, stream
        self.came = 0
        self._socks: List[socket.socket] = []
        self._listener = socket.create_server((address, port))
        self.at: Tuple[str, int] = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in [self._listener, *self._socks]:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it is not connected any more
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return  # it has been closed
            self.came += 1
            try:
                far = socket.create_connection(self.target)
            except OSError:
                near.close()
                continue
            self._socks += [near, far]
            for sock in (near, far):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ends = {"there": far, "back": near}
            for direction, source in (("there", near), ("back", far)):
                threading.Thread(target=self._pump, args=(direction, source, ends), daemon=True).start()

    def _pump(self, direction: str, source: socket.socket, ends: dict) -> None:
        left, buffer, number = HANDSHAKE_BYTES[direction], b"", 0
        try:
            while True:
                data = source.recv(65536)
                if not data:
                    break
                early, data = data[:left], data[left:]
                left -= len(early)
                if early:
                    ends[direction].sendall(early)
                if self.change is None:
                    ends[direction].sendall(self.stream(data) if data else b"")
                    continue
                buffer += data
                while len(buffer) >= _LENGTH.size:
                    size = _LENGTH.size + _LENGTH.unpack_from(buffer)[0] + TAG_BYTES
                    if len(buffer) < size:
                        break
                    frame, buffer = buffer[:size], buffer[size:]
                    for way, piece in self.change(direction, number, frame):
                        ends[way].sendall(piece)
                    number += 1
        except OSError:
            pass  # an end has hung up
        for sock in ends.values():
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # so has the other


def main(address: str, port: int, target: str, target_port: int) -> None:
    """Be a relay until stdin ends; then say how many connections came."""
    with Relay((target, target_port), address=address, port=port) as relay:
        print("listening", flush=True)
        sys.stdin.read()
        print(relay.came, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
