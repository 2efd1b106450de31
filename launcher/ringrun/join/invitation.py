"""The launcher's side: opens an invitation, lets machines in that prove its code, and starts agents on them.

The port is open only until all machines have come; one that the user has chosen is the rendezvous' port then.
Each connection has a thread, of which there are at most :data:`PLACES` before the proof; one that fails keeps
its place for a moment. The thread of a machine that has joined carries the streams of its agent
(:class:`.connection.Carrier`) until the launcher ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import threading
from collections import deque
from typing import IO, Any, Callable, Collection, Deque, Dict, Iterator, List, Optional, Sequence, Tuple

from ringcomm.clock import monotonic
from ringcomm.configuration.membership import format_endpoint
from ringcomm.errors import AuthenticationError, ConfigError, ProtocolError
from ringcomm.storage.keys import make_certificate
from ringcomm.transport.connect import listen
from ringcomm.transport.nics import LOOPBACK, own_addresses

from ..job.launch import invited, prepare
from ..plan.hosts import MAX_SLOTS, HostSpec
from ..plan.options import Options
from ..reach.base import Failure, Reach, last_lines
from ..reach.doors import is_own_name, own_user
from ..reach.incoming import decoded, fields, flag, said, text, whole
from ..reach.named_hosts import list_names
from .connection import (
    EXIT,
    START,
    STDERR,
    STDIN,
    STDOUT,
    TELL,
    Carrier,
    Frame,
    fingerprint_of,
    prove_to,
    secured,
)
from .discovery import Answerer
from .proof import MACHINE_NAME, NAME, NO_PROOF, WRONG_CODES, Account, Proof, Role, WrongCode, new_code

PLACES = 64
"""How many connections may be unproven at a time."""
PLACE_S = 0.3
"""How long a connection that has failed keeps its place."""
MAX_SHOWN = 4096
"""So many characters of the command are shown to the user of a machine that joins."""
_FACTS = fields({
    "python": text(4096), "cwd": text(4096), "cores": whole(1, MAX_SLOTS), "slots": whole(1, MAX_SLOTS),
})  # fmt: skip
_ANSWER = fields({"agreed": flag})
LOST = 255
"""The status of an agent whose machine is lost, like ssh's."""
_EXIT = fields({"status": whole(-64, 255), "why": text(1024)})
_LEAVING = fields({"leaving": said(200)})


def own_name() -> str:
    """This user and machine, as the other end shows them."""
    name = f"{own_user() or os.getuid()}@{socket.gethostname()}"[:64]
    return name if NAME.fullmatch(name) else "ringrun"


class Invitation:
    """Waits for machines."""

    def __init__(
        self, count: int, command: str, taken: Collection[str], say: Callable[[str], None], spec: str = "",
        port: int = 0,
    ) -> None:  # fmt: skip
        self._count, self._command, self._say = count, command, say
        self._taken = {name.lower() for name in taken}
        self.code = new_code()
        self._pem = make_certificate()
        self._fingerprint = fingerprint_of(self._pem)
        self._lock = threading.Condition()
        self._account = Account(count, monotonic())
        self.machines: List[Machine] = []
        self._places = threading.BoundedSemaphore(PLACES)
        self._closed = False
        self._interfaces = own_addresses(spec)
        self._listeners = self._listen(port)
        self.port = int(self._listeners[0].getsockname()[1])
        self._answerer: Optional[Answerer] = None
        if not port:
            with contextlib.suppress(OSError):  # then the address is given by hand
                self._answerer = Answerer(self._interfaces, self.code.label, self.port)
        self._acceptor = threading.Thread(target=self._accept, name="ringrun-join", daemon=True)
        self._acceptor.start()

    def _listen(self, port: int) -> List[socket.socket]:
        """Listeners on all addresses that may be used, with one port."""
        made: List[socket.socket] = []
        try:
            for item in [item for item in self._interfaces if not item.scope]:
                made.append(listen(item.address, port=port or (made[0].getsockname()[1] if made else 0)))
        except OSError as problem:
            for sock in made:
                sock.close()
            where = format_endpoint(item.address, port)
            raise ConfigError(f"Machines cannot join at {where}: {problem.strerror}.") from None
        return made

    @property
    def lines(self) -> str:
        """What to run on the other machines."""
        reachable = [item.address for item in self._interfaces if item.kind != LOOPBACK and not item.scope]
        address = (reachable or ["127.0.0.1"])[0]
        line = f"ringrun join {format_endpoint(address, self.port)} {self.code.shown}"
        found = ", in the same network also without the address" if self._answerer else ""
        machines = "the other machine" if self._count == 1 else f"each of the {self._count} other machines"
        return f"run this on {machines} within 10 minutes{found}:\n    {line}\nwaiting"

    def wait(self, limit_s: float) -> List[Machine]:
        """Wait for all machines."""
        first_s: Optional[float] = None
        with self._lock:
            while len(self.machines) < self._count:
                self._lock.wait(0.25)
                self._forget_lost()
                first_s = None if not self.machines else first_s or monotonic()
                late = first_s is not None and monotonic() - first_s > limit_s
                if late or self._account.is_over(monotonic()):
                    raise ConfigError(self._why_not(limit_s if late else None))
            return list(self.machines)

    def _forget_lost(self) -> None:
        for machine in [item for item in self.machines if item.over.is_set()]:
            self.machines.remove(machine)
            self._account.left += 1
            self._taken.discard(machine.name.lower())
            self._say(f"{machine.name} has left again: {machine.lost}")

    def _why_not(self, limit_s: Optional[float]) -> str:
        there = ", ".join(machine.name for machine in self.machines) or "none"
        within = "10 minutes" if limit_s is None else f"{limit_s:g} s of the first (--start-timeout)"
        when = "three wrong codes" if self._account.wrong >= WRONG_CODES else within
        counted = f"{len(self.machines)} of {self._count} machines have joined ({there})"
        return f"The invitation is over after {when}: {counted}. Start again for a fresh code."

    def close(self) -> None:
        """Close the port, which the rendezvous may get. Machines that have joined stay."""
        self._closed = True
        self._acceptor.join()

    def _accept(self) -> None:
        answerer = self._answerer
        watched = [*self._listeners, *([answerer.sock] if answerer else [])]
        try:
            while not self._closed and not self._account.is_over(monotonic()):
                for sock in select.select(watched, [], [], 0.2)[0]:
                    if answerer is not None and sock is answerer.sock:
                        answerer.answer()
                    elif self._places.acquire(timeout=0.2):
                        self._accept_one(sock)
        finally:
            for sock in watched:
                sock.close()

    def _accept_one(self, listener: socket.socket) -> None:
        try:
            sock, origin = listener.accept()
        except OSError:
            self._places.release()
            return
        threading.Thread(target=self._serve, args=(sock, origin[0]), name="ringrun-join", daemon=True).start()

    def _serve(self, sock: socket.socket, address: str) -> None:
        """One connection, from its first byte to its end."""
        machine, carrier = None, None
        try:
            proof = self._proven(sock)
        finally:
            self._places.release()
        if proof is None:
            sock.close()
            return
        try:
            carrier = Carrier(secured(sock, proof, Role.LAUNCHER, self._pem))
            machine = self._agreed(proof, address, carrier)
        except (AuthenticationError, ProtocolError, OSError) as problem:
            self._say(f"{proof.peer_name} ({address}) has not joined: {problem}")
            sock.close()
        with self._lock:
            if machine is None:
                self._account.left += 1
            else:
                self.machines.append(machine)
            self._lock.notify_all()
        if machine is not None:
            machine.run()
        elif carrier is not None:
            carrier.close()

    def _proven(self, sock: socket.socket) -> Optional[Proof]:
        """Return the proof of a connection whose other end has the code; None for another one."""
        proof: Optional[Proof] = None
        try:
            proof = prove_to(sock, lambda: Proof(Role.LAUNCHER, self.code, own_name(), self._fingerprint))
        except WrongCode:
            with self._lock:
                self._account.wrong += 1
        except (ProtocolError, OSError):
            threading.Event().wait(PLACE_S)
            return None
        with self._lock:
            if proof is not None and (self._closed or not self._account.use(monotonic())):
                proof = None
        with contextlib.suppress(OSError):
            sock.sendall(NO_PROOF if proof is None else proof.own)
        return proof

    def _agreed(self, proof: Proof, address: str, carrier: Carrier) -> Machine:
        """Return the machine at the other end, if its user agrees; ProtocolError if not."""
        facts = decoded(self._told(carrier), _FACTS)
        name = proof.peer_name
        refusal = self._why_refused(name)
        carrier.tell({"refused": refusal, "command": self._command, "slots": facts["slots"]})
        if refusal:
            carrier.turn(0.0)
            raise ProtocolError(refusal)
        cores = f"{facts['cores']} core{'' if facts['cores'] == 1 else 's'}"
        self._say(f"{name} ({address}, {cores}, digits {proof.digits}) has the code, and is being asked")
        try:
            if decoded(self._told(carrier), _ANSWER)["agreed"]:
                self._say(f"{name} has joined")
                return Machine(name, facts, carrier)
            raise ProtocolError("its user has not agreed")
        except (ProtocolError, OSError):
            self._taken.discard(name.lower())
            raise

    def _told(self, carrier: Carrier) -> bytes:
        """Return the next facts from the other end."""
        while not (carrier.ended or self._closed or self._account.is_over(monotonic())):
            for frame in carrier.turn(0.5):
                if frame.kind == TELL:
                    return frame.data
        raise ProtocolError("it closed the connection" if carrier.ended else "it has not answered in time")

    def _why_refused(self, name: str) -> str:
        with self._lock:
            if not MACHINE_NAME.fullmatch(name):
                return "its name is not valid: letters, digits, - and _ only (--name)"
            if name.lower() in self._taken or is_own_name(name, socket.gethostname()):
                return f"there is a host {name} in this job already (--name gives it another name)"
            self._taken.add(name.lower())
        return ""


@contextlib.contextmanager
def gathered(
    options: Options, command: Sequence[str], say: Callable[[str], None], only_plan: bool
) -> Iterator[Sequence[Tuple[HostSpec, Reach]]]:
    """The machines that the options invite, when all have come; at the end their connections are closed."""
    count, port = invited(options)
    absent = Joined({})
    drafted = [(HostSpec(f"join-{number}", slots=1), absent) for number in range(1, count + 1)]
    if only_plan or not count:
        yield drafted
        return
    draft = prepare(options, command, joined=drafted)  # so that mistakes show before a machine joins
    taken = [host.name for host in draft.hosts if host.reach is not absent]
    taken += [spec.name for spec in getattr(draft, "specs", ())] + list_names(os.environ)
    shown = draft.command.text("python")[:MAX_SHOWN]
    invitation = Invitation(count, shown, taken, say, draft.settings.iface, port)
    try:
        say(invitation.lines)
        machines = invitation.wait(draft.settings.start_timeout_s)
        invitation.close()
        way = Joined({machine.name: machine for machine in machines}, port)
        in_folder = options.ship is None and not options.cwd
        yield [(machine.spec(in_folder), way) for machine in machines]
    finally:
        invitation.close()
        for machine in invitation.machines:
            machine.close()


# -- a machine that has joined ---------------------------------------------------------------------


class RemoteAgent:
    """An agent on a machine that has joined, with the pipes and methods of :class:`subprocess.Popen`."""

    def __init__(self, machine: Machine) -> None:
        self.returncode: Optional[int] = None
        self._over = threading.Event()
        self.stdin: IO[bytes]
        self.stdout: IO[bytes]
        self.stderr: IO[bytes]
        (read_in, self.stdin), (self.stdout, write_out), (self.stderr, write_err) = _pipe(), _pipe(), _pipe()
        self._machine = machine
        self.sources, self.sinks = {STDIN: read_in}, {STDOUT: write_out, STDERR: write_err}
        machine.call(lambda: machine.begin(self))

    def poll(self) -> Optional[int]:
        """Its exit status; None while it runs."""
        return self.returncode

    def wait(self, timeout: Optional[float] = None) -> int:
        """Wait for its end."""
        if not self._over.wait(timeout):
            raise subprocess.TimeoutExpired("ringrun join", timeout or 0.0)
        return self.returncode or 0

    def kill(self) -> None:
        """Give it up. It ends by itself, as its stdin does."""
        self.end(-9)
        self._machine.call(lambda: self._machine.give_up(self))

    def end(self, status: int) -> None:
        """It has ended."""
        if self.returncode is None:
            self.returncode = status
        self._over.set()


def _pipe() -> Tuple[IO[bytes], IO[bytes]]:
    reader, writer = os.pipe()
    return open(reader, "rb", 0), open(writer, "wb", 0)


class Machine:
    """A machine that has joined."""

    def __init__(self, name: str, facts: Dict[str, Any], carrier: Carrier) -> None:
        self.name, self.facts = name, facts
        self.lost = ""
        self._carrier = carrier
        self._calls: Deque[Callable[[], None]] = deque()
        self._agent: Optional[RemoteAgent] = None
        self._closing = False
        self.over = threading.Event()

    def spec(self, with_folder: bool) -> HostSpec:
        """The machine as a host of a job."""
        folder = self.facts["cwd"] if with_folder else None
        return HostSpec(self.name, slots=self.facts["slots"], python=self.facts["python"], cwd=folder)

    def call(self, action: Callable[[], None]) -> None:
        """Do this in the machine's thread."""
        self._calls.append(action)
        self._carrier.wake()
        if self.over.is_set():  # no thread takes it any more
            self._do_calls()

    def _do_calls(self) -> None:
        while True:
            try:
                action = self._calls.popleft()  # by two threads at the end
            except IndexError:
                return
            action()

    def close(self, limit_s: float = 2.0) -> None:
        """End the connection: the job is over."""
        self.call(self._close)
        self.over.wait(limit_s)

    def _close(self) -> None:
        self._carrier.tell({"over": True})
        self._closing = True

    def begin(self, agent: RemoteAgent) -> None:
        """Have the machine start an agent."""
        if self._agent is not None:
            self._agent.end(LOST)
        self._agent = agent
        self._carrier.attach(self._carrier.number + 1, agent.sources, agent.sinks)
        self._carrier.send(START)
        if self.over.is_set():
            agent.end(LOST)
            self._carrier.detach()

    def give_up(self, agent: RemoteAgent) -> None:
        """Carry nothing for an agent any more."""
        if self._agent is agent:
            self._agent = None
            self._carrier.send(STDIN)
            self._carrier.detach()

    def run(self) -> None:
        """Carry the streams of agents until the connection ends."""
        try:
            while not self._carrier.ended and not (self._closing and not self._carrier.has_outgoing):
                for frame in self._carrier.turn(60.0):
                    self._take(frame)
                self._do_calls()
            self.lost = self.lost or "its connection was closed"
        except (ProtocolError, OSError) as problem:
            self.lost = f"its connection broke: {getattr(problem, 'strerror', None) or problem}"
        self._tear_down()

    def _take(self, frame: Frame) -> None:
        if frame.kind == EXIT and frame.number == self._carrier.number:
            facts = decoded(frame.data, _EXIT)
            self._carrier.finish(STDOUT)
            self._carrier.finish(STDERR, facts["why"].encode())
            if self._agent is not None:
                self._agent.end(facts["status"])
        elif frame.kind == TELL:
            self.lost = str(decoded(frame.data, _LEAVING)["leaving"])

    def _tear_down(self) -> None:
        """Let the launcher read what has come, and why nothing more does."""
        until_s = monotonic() + 5.0
        try:
            self._carrier.finish(STDERR, f"\n{self.lost}\n".encode())
            self._carrier.finish(STDOUT)
            self._carrier.ended = True
            while self._carrier.has_output and monotonic() < until_s:
                self._carrier.turn(0.1)
        except (ProtocolError, OSError):
            pass  # the connection is lost already
        finally:
            if self._agent is not None:
                self._agent.end(LOST)
            self._carrier.close()
            self.over.set()
            self._do_calls()


class Joined(Reach):
    """Starts agents on machines that have joined."""

    description = "joins with a code"
    connection = "the machine"
    gets_shell = False

    def __init__(self, machines: Dict[str, Machine], port: int = 0) -> None:
        self._machines, self.dials_port = machines, port > 0

    def argv(self, spec: HostSpec, python: str) -> List[str]:
        # For messages: the machine starts its own interpreter.
        return ["ringrun", "join", spec.name]

    def start(self, argv: Sequence[str]) -> Any:
        machine = self._machines[argv[-1]]
        if machine.over.is_set():
            raise OSError(0, machine.lost)
        return RemoteAgent(machine)

    def explain_unstarted(self, host: str, argv: Sequence[str], python: str, why: str) -> str:
        return f"{host}: the machine has left: {why}."

    def refused(
        self, host: str, argv: Sequence[str], status: Optional[int], output: str
    ) -> Optional[Failure]:
        return Failure(self.explain_loss(host, status, output)) if status == LOST else None

    def explain_loss(self, host: str, status: Optional[int], output: str) -> str:
        why = last_lines(output) if output.strip() else "its agent has ended there"
        return f"{host}: the machine that has joined is lost: {why}."
