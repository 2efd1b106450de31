"""``ringrun join``: gives this machine to a job of another one, as its agent's connection would over SSH."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from typing import Any, Callable, Iterator, Optional, Sequence, Tuple

from ringcomm.clock import monotonic
from ringcomm.configuration.membership import format_endpoint
from ringcomm.errors import AuthenticationError, ConfigError, ProtocolError
from ringcomm.storage.keys import make_certificate
from ringcomm.transport.reactor import SecureSocket

from ..plan.hosts import MAX_SLOTS
from ..reach.agent_process import LocalProcess
from ..reach.incoming import decoded, fields, flag, text, whole
from ..reach.protocol import BOOT
from .connection import EXIT, START, STDERR, STDIN, STDOUT, TELL, Carrier, Frame, fingerprint_of, join_with
from .discovery import find
from .proof import MACHINE_NAME, WRONG_CODES, Code, Proof, Role, WrongCode, parse_code

FIND_S, CONNECT_S = 10.0, 5.0
ASK_S = 60.0
END_S = 5.0
"""An agent has this long to end after its stdin has."""
_OFFER = fields({"refused": text(300), "command": text(65536), "slots": whole(1, MAX_SLOTS)})
_OVER = fields({"over": flag})
Say = Callable[[str], None]


def read_words(words: Sequence[str]) -> Tuple[Optional[Tuple[str, int]], str]:
    """The address and the code among the arguments; "" for a code that is to be read elsewhere."""
    address: Optional[Tuple[str, int]] = None
    rest = list(words)
    if rest and ":" in rest[0]:
        host, _, port = rest.pop(0).rpartition(":")
        host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(f"{words[0]!r} is no address: write HOST:PORT, as ringrun shows it.")
        address = host, int(port)
    return address, " ".join(rest)


def limit_cores(cores: Optional[int]) -> int:
    """Give the job so many of this process's cores; return how many it has."""
    if not hasattr(os, "sched_setaffinity"):
        if cores is not None:
            os.environ.setdefault("OMP_NUM_THREADS", str(cores))
        return min(cores or MAX_SLOTS, os.cpu_count() or 1)
    mine = sorted(os.sched_getaffinity(0))[:cores]  # type: ignore[attr-defined,unused-ignore]
    os.sched_setaffinity(0, mine)  # type: ignore[attr-defined,unused-ignore]
    return len(mine)


def connect(
    code: Code, address: Optional[Tuple[str, int]], name: str, pem: str
) -> Tuple[SecureSocket, Proof]:
    """The connection to the launcher that shows this code, at this address or found by discovery."""
    places: Iterator[Tuple[str, int]] = iter([address]) if address else find(code.label, FIND_S)
    wrong, why = 0, "nothing has answered in this network. Give the address that ringrun shows, HOST:PORT"
    for place in places:
        proof = Proof(Role.JOINING, code, name, fingerprint_of(pem))
        try:
            with socket.create_connection(place, CONNECT_S) as sock:
                return join_with(sock, proof, pem), proof
        except WrongCode:
            wrong, why = wrong + 1, "this is not its code, or all its places are taken"
        except (AuthenticationError, ProtocolError) as problem:
            why = f"{problem}"
        except OSError as problem:
            why = (
                f"{problem.strerror or problem}. The invitation may be over (it is open for 10 minutes), or "
                "a firewall there closes its port: join:N@PORT among its hosts uses one that can be opened"
            )
        why = f"{format_endpoint(*place)}: {why}"
        if wrong == WRONG_CODES:
            break
    raise ConfigError(f"No job was joined: {why}.")


class Guest:
    """This machine as a part of a job."""

    def __init__(self, carrier: Carrier, name: str, say: Say) -> None:
        self._carrier, self._name, self._say = carrier, name, say
        self._agent: Optional[LocalProcess] = None
        self._ended_s = 0.0
        self._signals = 0
        self._over = False

    def offered(self, slots: int, cores: int) -> Any:
        """Say what this machine is, and return what it is asked to run."""
        facts = {"python": sys.executable, "cwd": os.getcwd(), "cores": cores, "slots": slots}  # noqa: PTH109
        self._carrier.tell(facts)
        until_s = monotonic() + ASK_S
        while not self._carrier.ended and monotonic() < until_s:
            for frame in self._carrier.turn(1.0):
                offer = decoded(frame.data, _OFFER)
                if offer["refused"]:
                    raise ConfigError(f"{self._name} refuses this machine: {offer['refused']}.")
                return offer
        raise ConfigError(f"{self._name} has closed the connection.")

    def answer(self, agreed: bool) -> None:
        """Say whether the user agrees."""
        self._carrier.tell({"agreed": agreed})
        if not agreed:
            self._flush()

    def _flush(self) -> None:
        until_s = monotonic() + 2.0
        while self._carrier.has_outgoing and not self._carrier.ended and monotonic() < until_s:
            self._carrier.turn(0.1)

    def run(self) -> int:
        """Run the job's agents until it is over; return the exit code."""
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, self._interrupt)
        why = ""
        try:
            while not (self._carrier.ended or self._over or (self._signals and self._agent is None)):
                for frame in self._carrier.turn(0.05 if self._ended_s else 1.0):
                    self._take(frame)
                self._look()
        except (ProtocolError, OSError) as problem:
            why = f": {getattr(problem, 'strerror', None) or problem}"
        finally:
            self._end()
        if self._signals and not self._carrier.ended:
            self._carrier.tell({"leaving": "its user has left the job"})
            with contextlib.suppress(ProtocolError, OSError):
                self._flush()
        if self._signals:
            self._say("this machine has left the job")
            return 130
        self._say("the job is over" if self._over else f"the connection to {self._name} has ended{why}")
        return 0 if self._over else 1

    def _interrupt(self, signum: int, _: object) -> None:
        self._signals += 1
        if self._agent is None or self._agent.poll() is not None:
            pass
        elif self._signals == 1:
            os.kill(self._agent.pid, signal.SIGTERM)  # as from its own host: its ranks have time to end
        else:
            self._carrier.ended = True
        self._carrier.wake()

    def _take(self, frame: Frame) -> None:
        if frame.kind == START and not self._signals:
            self._end()
            self._agent = LocalProcess([sys.executable, "-c", BOOT])
            stdin, stdout, stderr = self._agent.stdin, self._agent.stdout, self._agent.stderr
            assert stdin is not None and stdout is not None and stderr is not None
            self._carrier.attach(frame.number, {STDOUT: stdout, STDERR: stderr}, {STDIN: stdin})
        elif frame.kind == TELL:
            self._over = bool(decoded(frame.data, _OVER)["over"])

    def _look(self) -> None:
        """Report the end of an agent, after its output."""
        if self._agent is None or self._agent.poll() is None:
            return
        self._ended_s = self._ended_s or monotonic()
        if self._carrier.has_output and monotonic() - self._ended_s < 1.0:
            return
        self._carrier.detach()
        why = "its user has ended it there" if self._signals else ""
        self._carrier.send(EXIT, json.dumps({"status": self._agent.returncode, "why": why}).encode())
        self._agent, self._ended_s = None, 0.0

    def _end(self) -> None:
        """End an agent as SSH does, by the end of its stdin."""
        self._carrier.detach()
        agent, self._agent, self._ended_s = self._agent, None, 0.0
        if agent is not None:
            try:
                agent.wait(END_S)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()


def join(
    words: Sequence[str], name: str, slots: int, cores: Optional[int], say: Say,
    read_code: Callable[[], str], ask: Callable[[str], bool],
) -> int:  # fmt: skip
    """Join a job and take part in it; return the exit code."""
    name = name or socket.gethostname().split(".")[0]
    if not MACHINE_NAME.fullmatch(name):
        raise ConfigError(f"{name!r} cannot be this machine's name in a job: letters, digits, - and _ only.")
    address, typed = read_words(words)
    code = parse_code(typed or read_code())
    has = limit_cores(cores)
    sock, proof = connect(code, address, name, make_certificate())
    here, there = sock.getsockname(), sock.getpeername()
    # Where other launchers' ranks meet (MASTER_ADDR) follows from it.
    os.environ["SSH_CONNECTION"] = f"{there[0]} {there[1]} {here[0]} {here[1]}"
    carrier = Carrier(sock)
    try:
        guest = Guest(carrier, proof.peer_name, say)
        offer = guest.offered(slots, has)
        ranks = f"up to {slots} ranks" if slots > 1 else "one rank"
        agreed = ask(
            f"{proof.peer_name} ({there[0]}, digits {proof.digits}) asks this machine to run\n"
            f"    {offer['command']}\nas {ranks}, with all your rights on this machine"
        )
        guest.answer(agreed)
        if not agreed:
            return 1
        say(f"{name} is part of the job of {proof.peer_name} (Ctrl-C leaves it)")
        return guest.run()
    finally:
        carrier.close()
