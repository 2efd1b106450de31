"""The agent of a rank, as far as its flight recorder sees it."""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import signal
import socket
import threading

from ringcomm.job.flight_recorder import RecorderSocket
from tests.support.service import eventually

LIMIT_S = 60.0


class Agent:
    """ringrun's end of a channel."""

    def __init__(self):
        self.socket, self.theirs = socket.socketpair()
        self.socket.settimeout(LIMIT_S)
        self.pipe, self.stacks = os.pipe()
        self.lines = self.socket.makefile("rb")
        self.channel = None
        self.before = answering()

    def open(self):
        faulthandler.unregister(signal.SIGUSR1)
        self.channel = RecorderSocket(self.theirs, self.stacks)
        return self.channel

    def next(self):
        return json.loads(self.lines.readline())

    def ask(self, *requests):
        self.socket.sendall(b"".join(requests))

    def threads(self):
        return [thread for thread in answering() if thread not in self.before]

    def hang_up(self):
        self.lines.close()
        self.socket.close()

    def close(self):
        self.hang_up()
        if self.channel is not None:
            atexit.unregister(self.channel._report_end)
            faulthandler.unregister(signal.SIGUSR1)
            assert eventually(lambda: not self.threads())
        self.theirs.close()
        os.close(self.pipe)
        os.close(self.stacks)


def answering():
    return [thread for thread in threading.enumerate() if thread.name == "ringcomm-flight"]
