"""``ringrun join``: gives this machine to a job of another one, as its agent's connection would over SSH."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from itertools import chain
from typing import Any, Callable, Optional, Sequence, Tuple

from ringcomm.clock import monotonic
from ringcomm.configuration.membership import format_endpoint
from ringcomm.errors import AuthenticationError, ConfigError, ProtocolError, RingcommError
from ringcomm.storage.keys import make_certificate
from ringcomm.transport.reactor import SecureSocket

from ..plan.hosts import MAX_SLOTS
from ..reach.incoming import decoded, fields, flag, text
from ..reach.protocol import BOOT, LocalProcess
from .connection import Carrier, Kind, find, fingerprint_of, join_with
from .proof import (
    CODE_S,
    FORM_OF_NAME,
    KEY,
    LAUNCHERS,
    MACHINE_NAME,
    WRONG_CODES,
    Code,
    Known,
    Proof,
    Role,
    WrongCode,
    drop,
    find_known,
    keep,
    known_names,
    launcher_key,
    parse_code,
)

FIND_S, CONNECT_S, PAUSE_S = 10.0, 5.0, 2.0
ASK_S = 60.0
END_S = 5.0  # so long an agent has to end after its stdin has
_OFFER = fields({"refused": text(300), "command": text(65536), "again": flag, **KEY})
_WELCOME = fields({"keeps": flag})
_OVER = fields({"over": flag})
Say = Callable[[str], Any]


def read_words(words: Sequence[str]) -> Tuple[Optional[Tuple[str, int]], str]:
    """The address and the code among the arguments; "" for a code that is to be read elsewhere."""
    words = [word for text in words for word in text.split()]
    if not words or ":" not in words[0]:
        if words and not re.match(r"[0-9]{1,3}(?![0-9.])", words[0]):
            raise ConfigError(
                f"{words[0]!r:.80} is neither an address (HOST:PORT, as ringrun shows it) nor the beginning "
                "of a code."
            )
        return None, " ".join(words)
    found = re.fullmatch(r"(?:\[([^][]+)\]|([^][:]+)):(\d{1,5})", words[0], re.ASCII)
    if not found or not 0 < int(found[3]) < 65536:
        raise ConfigError(f"{words[0]!r} is no address: write HOST:PORT, as ringrun shows it.")
    return (found[1] or found[2], int(found[3])), " ".join(words[1:])


def limit_cores(cores: Optional[int]) -> int:
    """Give the job so many of this process's cores; return how many it has."""
    if hasattr(os, "sched_setaffinity"):
        mine = sorted(os.sched_getaffinity(0))[:cores]  # type: ignore[attr-defined,unused-ignore]
        os.sched_setaffinity(0, mine)  # type: ignore[attr-defined,unused-ignore]
        return len(mine)
    if cores is not None:
        os.environ.setdefault("OMP_NUM_THREADS", str(cores))
    return min(cores or MAX_SLOTS, os.cpu_count() or 1)


def connect(
    code: Code, address: Optional[Tuple[str, int]], name: str, pem: str,
    is_valid: Callable[[], bool] = lambda: True,
) -> Tuple[SecureSocket, Proof]:  # fmt: skip
    """Return the connection to the launcher with this code or key, at this address or found by discovery.

    A key may be removed while discovery waits: it is used only while it ``is_valid``.
    """
    found = () if address and not code.is_kept else find(code.label, FIND_S)
    wrong, why = 0, "nothing has answered in this network. Give the address that ringrun shows, HOST:PORT"
    for place in chain([address] if address else [], found):
        if not is_valid():
            break
        proof = Proof(Role.JOINING, code, name, fingerprint_of(pem))
        try:
            with socket.create_connection(place, CONNECT_S) as sock:
                return join_with(sock, proof, pem), proof
        except WrongCode:
            wrong, why = wrong + 1, "this is not its code, or all its places are taken"
        except (AuthenticationError, ProtocolError) as problem:
            why = f"{problem}"
        except (socket.gaierror, UnicodeError) as problem:
            why = f"{getattr(problem, 'strerror', None) or problem}"
        except OSError as problem:
            why = f"{problem.strerror or problem}. The invitation may be over (after 10 minutes), or a "
            why += "firewall there closes its port: join:N@PORT among its hosts uses one that can be opened"
        why = f"{format_endpoint(*place)}: {why}"
        if wrong == WRONG_CODES:
            break
    raise ConfigError(f"No job was joined: {why}.")


class Guest:
    """This machine as a part of a job of a launcher, over one connection."""

    def __init__(self, carrier: Carrier, launcher: str, say: Say) -> None:
        self._carrier, self._launcher, self._say = carrier, launcher, say
        self._agent: Optional[LocalProcess] = None
        self._ended_s = 0.0
        self._signals = 0
        self._over = False

    def offered(self, slots: int, cores: int, tag: str = "") -> Any:
        """Say what this machine is, and return what it is asked to run."""
        here = {"python": sys.executable, "cwd": os.getcwd(), "cores": cores, "slots": slots}  # noqa: PTH109
        self._carrier.tell({**here, "known": tag})
        offer = self._carrier.told(_OFFER, monotonic() + ASK_S)
        if offer["refused"]:
            raise ConfigError(f"{self._launcher} refuses this machine: {offer['refused']}.")
        return offer

    def run(self) -> int:
        """Run the job's agents until it is over (0), the connection is lost (1) or the user leaves (130)."""
        stops = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = [signal.signal(signum, self._interrupt) for signum in stops]
        why = ""
        try:
            while not (self._carrier.ended or self._over or (self._signals and self._agent is None)):
                for frame in self._carrier.turn(0.05 if self._ended_s else 1.0):
                    self._take(*frame)
                self._look()
            if self._signals and not self._carrier.ended:
                self._carrier.tell({"leaving": "its user has left the job"})
                self._carrier.flush()
        except (ProtocolError, OSError) as problem:
            why = f": {getattr(problem, 'strerror', None) or problem}"
        finally:
            self._end()
            for signum, handler in zip(stops, before):
                signal.signal(signum, handler)
        if self._signals:
            self._say("this machine has left the job")
            return 130
        self._say("the job is over" if self._over else f"the connection to {self._launcher} has ended{why}")
        return 0 if self._over else 1

    def _interrupt(self, signum: int, _: object) -> None:
        self._signals += 1
        if self._agent is not None and self._agent.poll() is None:
            if self._signals == 1:
                os.kill(self._agent.pid, signal.SIGTERM)  # as from its own host: its ranks have time to end
            else:
                self._carrier.ended = True
        self._carrier.wake()

    def _take(self, kind: int, number: int, data: bytes) -> None:
        if kind == Kind.START and not self._signals:
            self._end()
            agent = self._agent = LocalProcess([sys.executable, "-c", BOOT])
            assert agent.stdin is not None and agent.stdout is not None and agent.stderr is not None
            sources = {Kind.STDOUT: agent.stdout, Kind.STDERR: agent.stderr}
            self._carrier.attach(number, sources, {Kind.STDIN: agent.stdin})
        elif kind == Kind.TELL:
            self._over = bool(decoded(data, _OVER)["over"])

    def _look(self) -> None:
        """Report the end of an agent, after its output."""
        if self._agent is None or self._agent.poll() is None:
            return
        self._ended_s = self._ended_s or monotonic()
        if self._carrier.has_output and monotonic() - self._ended_s < 1.0:
            return
        self._carrier.detach()
        why = "its user has ended it there" if self._signals else ""
        self._carrier.send(Kind.EXIT, json.dumps({"status": self._agent.returncode, "why": why}).encode())
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


def take_part(
    sock: SecureSocket, proof: Proof, name: str, slots: int, cores: int, say: Say, ask: Callable[[str], bool]
) -> Tuple[int, float]:
    """Take part in a job; return the exit code, and until when to return after a lost connection."""
    launcher, here, there = proof.peer_name, sock.getsockname(), sock.getpeername()
    # Where other launchers' ranks meet (MASTER_ADDR) follows from it.
    os.environ["SSH_CONNECTION"] = f"{there[0]} {there[1]} {here[0]} {here[1]}"
    entry = launcher_key(launcher, name)
    known = None if proof.by_key else find_known(LAUNCHERS, entry)
    with contextlib.closing(Carrier(sock)) as carrier:
        guest = Guest(carrier, launcher, say)
        offer = guest.offered(slots, cores, proof.tag_of(known.code) if known else "")
        if known and known.secret != offer["secret"]:
            why = "another launcher of this name is known there"
            carrier.tell({"agreed": False, "keeps": False, "why": why})
            carrier.flush()
            raise ConfigError(
                f"{launcher} is another launcher than the one known here, or has forgotten this machine. If "
                f"that is right: ringrun hosts forget {launcher}, after which only this one is known"
            )
        ranks = f"up to {slots} ranks" if slots > 1 else "one rank"
        command = offer["command"].replace("\n", "\\n")  # no line of it may look like one of ringrun
        agreed = ask(
            f"{launcher} ({there[0]}, digits {proof.digits}) asks this machine to run\n"
            f"    {command}\nas {ranks}, with all your rights on this machine"
        )
        key = Known(offer["label"], offer["secret"], name, *there[:2])
        # While the user was asked, another process may have kept a key, or removed it.
        is_free = agreed and not proof.by_key and find_known(LAUNCHERS, entry) == known
        keeps = is_free and keep(LAUNCHERS, entry, key, say)
        carrier.tell({"agreed": agreed, "keeps": keeps, "why": "" if agreed else "its user has not agreed"})
        if not agreed:
            carrier.flush()
            say("this machine has not joined")
            return 2, 0.0
        is_welcome = {"keeps": False}
        try:
            is_welcome = carrier.told(_WELCOME, monotonic() + ASK_S)
        except (ProtocolError, OSError) as problem:
            text = f"{launcher} has not let this machine in: {problem}. Its invitation may be over."
            raise ConfigError(text) from None
        finally:
            if keeps and known is None and not is_welcome["keeps"] and find_known(LAUNCHERS, entry) == key:
                drop(LAUNCHERS, entry)  # only one end would have it
        say(f"{name} is part of the job of {launcher} (Ctrl-C leaves it)")
        status = guest.run()
        returns = status == 1 and offer["again"] and find_known(LAUNCHERS, entry) is not None
        return status, monotonic() + CODE_S if returns else 0.0


def join(
    words: Sequence[str], name: str, slots: int, cores: Optional[int], stay: bool, say: Say,
    read_code: Callable[[], str], ask: Callable[[str], bool],
) -> int:  # fmt: skip
    """Join a job, and return to it or stay for others; return the exit code, 130 if the user has ended it."""
    name = name or socket.gethostname().split(".")[0]
    if not MACHINE_NAME.fullmatch(name):
        text = f"{name!r:.80} cannot be this machine's name in a job. --name NAME: {FORM_OF_NAME}."
        raise ConfigError(text)
    address, typed = read_words(words)
    gives, launchers = (slots, limit_cores(cores), say), known_names(LAUNCHERS)
    if stay and not (launchers or typed):
        raise ConfigError("No launcher is known here. Join with a code: ringrun join --stay CODE")
    if stay and not ask("known launchers run what they want here until Ctrl-C, with all your rights"):
        return 2
    pem, status, until_s = make_certificate(), 0, 0.0
    if typed or not stay:
        if not typed:  # perhaps the whole line is pasted
            found, typed = read_words(re.sub(r"^\s*ringrun\s+join\s", "", read_code()).split())
            address = address or found
        sock, proof = connect(parse_code(typed), address, name, pem)
        status, until_s = take_part(sock, proof, name, *gives, ask)
        launchers = [launcher_key(proof.peer_name, name)]
    while status < 2 and (stay or monotonic() < until_s):
        for launcher in known_names(LAUNCHERS) if stay else launchers:
            known = find_known(LAUNCHERS, launcher)
            if known is not None and status < 2:
                is_kept = partial(_is_kept, launcher, known)
                with contextlib.suppress(RingcommError, OSError):  # it does not wait for this machine
                    sock, proof = connect(known.code, address or known.address, known.here, pem, is_kept)
                    status, until_s = take_part(sock, proof, known.here, *gives, lambda it: not say(it))
        time.sleep(PAUSE_S)
    return status


def _is_kept(launcher: str, known: Known) -> bool:
    return find_known(LAUNCHERS, launcher) == known
