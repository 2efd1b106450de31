"""The program of one host for ``ringrun doctor``: facts, and the network as a job sees it. Runs on the host.

It needs no package there: :mod:`ringrun.doctor.hosts` sends this file and its imports. After :data:`MARKER`,
each line on stdin is a command as JSON, and each line on stdout its answer. The program ends when stdin does.

A host listens, dials and measures by :class:`~ringcomm.rendezvous.links.LinkSetup`, as the first rank of a
job does. So it also accepts connections only after the handshake, with a key that was made for this run and
comes over stdin.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Dict, Optional

from ringcomm.errors import RingcommError
from ringcomm.rendezvous.links import LinkSetup
from ringcomm.transport.nics import machine, own_addresses
from ringcomm.transport.reactor import READ, Reactor
from ringcomm.transport.secure import encryption_of
from ringcomm.wire.auth import job_digest
from ringrun.doctor import facts

MARKER = "ringrun-doctor/3"
STDIN = 0


class Commands:
    """Answers commands until stdin ends."""

    def __init__(self) -> None:
        self._reactor = Reactor()
        self._received = b""
        self._ended = False
        self._setup: Optional[LinkSetup] = None

    def fileno(self) -> int:
        return STDIN

    def run(self) -> None:
        """Serve commands and peers."""
        self._reactor.watch(self, READ, self._read)
        try:
            while not self._ended:
                self._reactor.run_once(3600.0)
        finally:
            if self._setup is not None:
                self._setup.close()
            self._reactor.close()

    def _read(self) -> None:
        data = os.read(STDIN, 1 << 16)
        self._ended = not data
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            self._execute(json.loads(line.decode()))

    def _execute(self, command: Dict[str, Any]) -> None:
        do, setup = command["do"], self._setup
        if do == "facts":
            answer(facts.collect(os.path.expanduser(command["cwd"])))  # noqa: PTH111
        elif do == "listen":
            answer(self._listen(command))
        elif do == "probe" and setup is not None:
            setup.probe(command["targets"], command["within_s"], answer)
        elif do == "measure" and setup is not None:
            setup.measure(command["pairs"], answer)
        else:
            raise ValueError(f"no command: {command}")

    def _listen(self, command: Dict[str, Any]) -> Dict[str, Any]:
        """Listen as a rank does; return the addresses, or why that is not possible."""
        key, encryption = bytes.fromhex(command["key"]), encryption_of(command["certificate"])
        try:
            self._setup = LinkSetup(
                self._reactor, own_addresses(command["iface"]), key, job_digest(command["job"]),
                lambda message: None, encryption,
            )  # fmt: skip
        except RingcommError as problem:
            return {"problem": str(problem)}
        self._setup.assign_rank(command["rank"], 0)
        return {"addresses": self._setup.offers(), "machine": machine()}


def answer(content: Any) -> None:
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Answer commands until stdin ends."""
    sys.stdout.write("\n" + MARKER + "\n")
    sys.stdout.flush()
    Commands().run()


if __name__ == "__main__":
    main()
