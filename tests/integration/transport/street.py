"""An acceptor with unauthenticated peers and ranks in front of it."""

from __future__ import annotations

import socket

from ringcomm.storage.keys import make_certificate
from ringcomm.transport.connect import Dial
from ringcomm.transport.secure import encryption_of
from tests.support.service import CLAIM, KEY, Door


class Street:
    """An acceptor with unauthenticated peers and ranks; a failed connection keeps its place for `place_s`."""

    def __init__(self, reactor, stack, place_s=0.0, encrypt=False):
        certificate = make_certificate() if encrypt else ""
        self.encryption = encryption_of(certificate)
        self.door = Door(reactor, place_s=place_s, certificate=certificate)
        self.stack = stack
        self.ends = []
        stack.callback(self.door.close)

    def peer(self, words=b""):
        sock = self.stack.enter_context(socket.socket())
        sock.setblocking(False)
        sock.connect_ex(self.door.address)
        if words:
            try:
                sock.send(words)
            except BlockingIOError:
                pass  # No peer keeps it waiting.
        return sock

    def time_passes(self):
        """Give all places back that failed connections have kept."""
        self.door.acceptor._failed = 0

    def rank(self):
        door, encryption = self.door, self.encryption
        Dial(door.reactor, door.address, KEY, CLAIM, self._ended, 30.0, encryption=encryption)

    def _ended(self, dial):
        self.ends.append(dial.reason)
        if dial.sock is not None:
            self.stack.enter_context(dial.sock)
