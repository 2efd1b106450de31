"""The launcher's side: opens an invitation, lets machines in that prove its code, and starts agents on them.

The port is open until all machines have come, and in an elastic job as long as that runs: a machine that was
lost joins again by its key. A port that the user has chosen belongs to the rendezvous then, which passes such
connections on. Each connection has a thread, of which there are at most :data:`PLACES` before the proof; one
that fails keeps its place for a moment. The thread of a machine that has joined carries the streams of its
agent (:class:`.connection.Carrier`) until the launcher ends.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import queue
import select
import socket
import subprocess
import threading
from typing import IO, Any, Callable, Collection, Dict, Iterator, List, Optional, Sequence, Set, Tuple

from ringcomm.clock import monotonic
from ringcomm.configuration.membership import format_endpoint
from ringcomm.errors import ConfigError, ProtocolError, RingcommError
from ringcomm.storage.keys import make_certificate
from ringcomm.transport.connect import listen
from ringcomm.transport.nics import LOOPBACK, own_addresses

from ..job.launch import invited, per_host, prepare
from ..plan.hosts import MAX_SLOTS, HostSpec
from ..plan.job import Job
from ..plan.options import Options
from ..reach.base import Failure, Reach, is_own_name, last_lines
from ..reach.incoming import decoded, fields, flag, said, text, whole
from ..reach.named_hosts import list_names
from .connection import Answerer, Carrier, Kind, fingerprint_of, prove_to, secured
from .proof import (
    CODE_S,
    FORM_OF_NAME,
    MACHINE_NAME,
    MACHINES,
    NO_PROOF,
    Known,
    Proof,
    Role,
    WrongCode,
    find_known,
    keep,
    new_code,
    new_key,
    own_name,
    why_over,
)

PLACES = 64  # that many connections may be unproven at a time
PLACE_S = 0.3  # for so long a connection that has failed keeps its place
AGAIN_S = 10.0  # so long a known machine may take to answer
MAX_SHOWN = 4096  # characters of the command that the user of a machine sees
LOST = 255  # the status of an agent whose machine is lost, like ssh's
_FACTS = fields({
    "python": text(4096), "cwd": text(4096), "cores": whole(1, MAX_SLOTS), "slots": whole(1, MAX_SLOTS),
    "known": text(64, "[0-9a-f]*"),
})  # fmt: skip
_ANSWER = fields({"agreed": flag, "keeps": flag, "why": said(200)})
_EXIT = fields({"status": whole(-64, 255), "why": text(1024)})
_LEAVING = fields({"leaving": said(200)})


class Invitation:
    """Waits for machines: `count` with a code, the known ones of `names`; with `again` they may return."""

    def __init__(
        self, count: int, command: str, taken: Collection[str], say: Callable[[str], None], spec: str = "",
        port: int = 0, names: Sequence[str] = (), again: bool = False,
    ) -> None:  # fmt: skip
        self._count, self._names, self._again, self.is_chosen = count, names, again, port > 0
        self._command, self._say = command, say
        self._taken = {name.lower() for name in (*taken, *names)}
        self._asked: Set[str] = set()
        self._expected = set(names)  # that may come by their keys
        self.code = new_code()
        labels = [self.code.label] if count and not port else []
        for name in names:
            known = find_known(MACHINES, name)
            if known is None:
                raise ConfigError(f"No machine {name} is known here (ringrun hosts). join:1 makes a code.")
            labels.append(known.label)
        self._pem = make_certificate()
        self._fingerprint = fingerprint_of(self._pem)
        self._lock = threading.Condition()
        self._left, self._wrong, self._until_s = count, 0, monotonic() + CODE_S
        self.machines: Dict[str, Machine] = {}
        self._unproven: Set[socket.socket] = set()
        self._begun = self._closed = False
        self._interfaces = own_addresses(spec)
        self._listeners = self._listen(port)
        self.port = int(self._listeners[0].getsockname()[1])
        self._answerer: Optional[Answerer] = None
        with contextlib.suppress(OSError):  # then the address is given by hand
            self._answerer = Answerer(self._interfaces, labels, self.port) if labels else None
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
        lines = [f"waiting for {', '.join(self._names)} (ringrun join --stay there)"] if self._names else []
        if self._count:
            reachable = [it.address for it in self._interfaces if it.kind != LOOPBACK and not it.scope]
            address = format_endpoint((reachable or ["127.0.0.1"])[0], self.port)
            # The question comes by IPv4.
            has_ipv4 = any(":" not in address for address in reachable)
            is_found = self._answerer is not None and has_ipv4 and not self.is_chosen
            found = ", in the same network also without the address" if is_found else ""
            each = "the other machine" if self._count == 1 else f"each of the {self._count} other machines"
            lines.append(f"run this on {each} within 10 minutes{found}:")
            lines.append(f"    ringrun join {address} {self.code.shown}\nwaiting")
            if not reachable:
                lines.insert(-2, "this machine has no address that others reach: only programs here can join")
        return "\n".join(lines)

    def wait(self, limit_s: Optional[float] = None) -> List[Machine]:
        """Wait for all machines; with a limit, for at most so many seconds after the first."""
        first_s, wanted = 0.0, self._count + len(self._names)
        with self._lock:
            while len(self.machines) < wanted:
                self._lock.wait(0.25)
                self._forget_lost()
                first_s = (first_s or monotonic()) if self.machines else 0.0
                why = why_over(self._wrong, self._until_s - monotonic())
                if limit_s and first_s and monotonic() - first_s > limit_s:
                    why = f"{limit_s:g} s of the first (--start-timeout)"
                if why:
                    raise ConfigError(
                        f"The invitation is over after {why}: {len(self.machines)} of {wanted} machines have "
                        f"joined ({', '.join(self.machines) or 'none'}). Start again for a fresh code."
                    )
            return list(self.machines.values())

    def _forget_lost(self) -> None:
        for machine in [item for item in self.machines.values() if item.over.is_set()]:
            del self.machines[machine.name]
            self._left += machine.name not in self._names
            self._say(f"{machine.name} has left again: {machine.lost}")

    def begin(self) -> None:
        """All machines have come: close the port, unless they may join again and the rendezvous has none."""
        self._left, self._begun = 0, True
        self._expected = set(self.machines) if self._again else set()
        if not self._again or self.is_chosen:
            self._closed = True
            self._acceptor.join()

    def close(self) -> None:
        """Let no machine in any more. Machines that have joined stay."""
        self._left, self._expected, self._closed = 0, set(), True
        self._acceptor.join()

    def _accept(self) -> None:
        answerer = self._answerer
        watched = [*self._listeners, *([answerer.sock] if answerer else [])]
        while not self._closed and (self._begun or not why_over(self._wrong, self._until_s - monotonic())):
            is_full = len(self._unproven) >= PLACES  # then others wait in the system's backlog
            for sock in select.select([] if is_full else watched, [], [], 0.2)[0]:
                if answerer is not None and sock is answerer.sock:
                    answerer.answer()
                else:
                    with contextlib.suppress(OSError):
                        self.take(sock.accept()[0])
        for sock in watched:
            sock.close()

    def take(self, sock: socket.socket) -> None:
        """Serve a connection, which the rendezvous may have accepted (any thread)."""
        if len(self._unproven) >= PLACES:
            sock.close()
            return
        self._unproven.add(sock)
        threading.Thread(target=self._serve, args=(sock,), name="ringrun-join", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        """One connection, from its first byte to its end."""
        proof: Optional[Proof] = None
        carrier: Any = sock
        try:
            address = str(sock.getpeername()[0])
            try:
                proof = self._proven(sock)
            finally:
                self._unproven.discard(sock)
            carrier = Carrier(secured(sock, proof, Role.LAUNCHER, self._pem))
            machine = self._agreed(proof, address, carrier)
        except (RingcommError, OSError) as problem:
            carrier.close()
            if proof is not None:
                self._say(f"{proof.peer_name} ({address}) has not joined: {problem}")
                with self._lock:
                    self._left += not (proof.by_key or self._begun)
            return
        machine.run()

    def _proof(self, by_key: bool, name: str) -> Proof:
        """Return this end of a connection; without a key for that name it fails as with another key."""
        known = find_known(MACHINES, name) if by_key and name in self._expected else None
        code = known.code if known else new_key() if by_key else self.code
        return Proof(Role.LAUNCHER, code, own_name(), self._fingerprint)

    def _proven(self, sock: socket.socket) -> Proof:
        """Return the proof of a connection whose other end has the code or a key."""
        try:
            proof = prove_to(sock, self._proof)
        except WrongCode:
            self._wrong += self._count > 0
            sock.sendall(NO_PROOF)
            raise
        except (RingcommError, OSError):
            threading.Event().wait(PLACE_S)
            raise
        with self._lock:
            is_over = self._left < 1 or why_over(self._wrong, self._until_s - monotonic())
            self._left -= not (proof.by_key or is_over)
        with contextlib.suppress(OSError):
            sock.sendall(NO_PROOF if is_over and not proof.by_key else proof.own)
        if is_over and not proof.by_key:
            raise ProtocolError("all places are taken")
        return proof

    def _agreed(self, proof: Proof, address: str, carrier: Carrier) -> Machine:
        """Return the machine at the other end, if its user agrees; ProtocolError if not."""
        until_s = monotonic() + AGAIN_S if proof.by_key else self._until_s
        facts, name = carrier.told(_FACTS, until_s), proof.peer_name
        known = find_known(MACHINES, name)
        is_same = known is None or hmac.compare_digest(proof.tag_of(known.code), facts["known"])
        refusal = "" if proof.by_key else self._why_refused(name, is_same)
        code = known.code if known and not refusal else new_key()
        key = {"label": code.label, "secret": code.secret}
        carrier.tell({"refused": refusal, "command": self._command, "again": self._again, **key})
        if refusal:
            carrier.flush()
            raise ProtocolError(refusal)
        if not proof.by_key:
            cores = f"{facts['cores']} core{'' if facts['cores'] == 1 else 's'}"
            self._say(f"{name} ({address}, {cores}, digits {proof.digits}) has the code, and is being asked")
        try:
            answer = carrier.told(_ANSWER, until_s)
            if not answer["agreed"]:
                raise ProtocolError(answer["why"])
            machine = Machine(HostSpec(name, None, facts["slots"], facts["python"], facts["cwd"]), carrier)
            with self._lock:
                before, self.machines[name] = self.machines.get(name), machine
                joined = f"{name} has joined{self._progress()}"
                self._lock.notify_all()
        finally:
            self._asked.discard(name.lower())
        if before is not None:
            before.call(before.drop)
        try:
            keeps = answer["keeps"] and (
                known is not None or keep(MACHINES, name, Known(code.label, code.secret), self._say)
            )
            carrier.tell({"keeps": keeps})
            self._say(joined)
        except Exception:
            machine.over.set()  # no thread serves it
            raise
        return machine

    def _progress(self) -> str:
        """Return how many machines are there, while more are awaited."""
        wanted = self._count + len(self._names)
        return f": {len(self.machines)} of {wanted}" if wanted > 1 and not self._begun else ""

    def _why_refused(self, name: str, is_same: bool) -> str:
        with self._lock:
            taken = {*self._taken, *self._asked, *(other.lower() for other in self.machines)}
            if not MACHINE_NAME.fullmatch(name):
                return f"its name is not valid (--name gives it another one: {FORM_OF_NAME})"
            if name.lower() in taken or is_own_name(name, socket.gethostname()):
                return f"there is a host {name} in this job already (--name gives it another name)"
            if not is_same:
                return f"{name} is another machine there (--name, or there: ringrun hosts forget {name})"
            self._asked.add(name.lower())
        return ""


def _check_slots(options: Options, draft: Job, machines: Sequence[Machine]) -> None:
    """Raise ConfigError if the machines that have joined offer fewer slots than the job needs."""
    needed = options.min_np or options.np or 0
    offered = {machine.name: machine.spec.slots or 1 for machine in machines}
    total = sum(offered.values())
    total += sum(host.planned.slots for host in draft.hosts if host.reach.is_named)
    if not (options.is_elastic or options.oversubscribe) and needed > total:
        listed = ", ".join(f"{name} offers {slots}" for name, slots in offered.items())
        raise ConfigError(
            f"-np {needed} needs {needed} slots, and there are {total}: {listed}. Join with --slots N there, "
            "or use fewer ranks."
        )


@contextlib.contextmanager
def gathered(
    options: Options, command: Sequence[str], say: Callable[[str], None], only_plan: bool
) -> Iterator[Sequence[Tuple[HostSpec, Reach]]]:
    """The machines that the options invite, when all have come; at the end their connections are closed."""
    count, names, port = invited(options)
    absent = Joined()
    # How many ranks the machines take is not known yet: as many as the job needs.
    slots = max(options.np or 1, options.min_np or 1)
    drafted = [HostSpec(name, slots=slots) for name in (*(f"join-{n + 1}" for n in range(count)), *names)]
    if only_plan or not drafted:
        yield [(spec, absent) for spec in drafted]
        return
    # So that mistakes show before a machine joins.
    draft = prepare(options, command, joined=[(spec, absent) for spec in drafted])
    taken = [host.name for host in draft.hosts if host.reach is not absent]
    taken += [spec.name for spec in getattr(draft, "specs", ())] + list_names(os.environ)
    shown = draft.command.text("python")[:MAX_SHOWN]
    invitation = Invitation(count, shown, taken, say, draft.settings.iface, port, names, options.is_elastic)
    try:
        say(invitation.lines)
        limited = any(name == "start-timeout" and by != "default" for name, _, by in draft.setting_rows)
        machines = invitation.wait(draft.settings.start_timeout_s if limited else None)
        _check_slots(options, draft, machines)
        invitation.begin()
        way, specs = Joined(invitation), [machine.spec for machine in machines]
        given = per_host("--cwd", options.cwd, None)
        sent = options.ship is not None or None in given  # then a machine's own directory has no effect
        specs = [spec._replace(cwd=None) if sent or spec.name in given else spec for spec in specs]
        yield [(spec, way) for spec in specs]
    finally:
        invitation.close()
        for machine in list(invitation.machines.values()):
            machine.close()


# -- a machine that has joined ---------------------------------------------------------------------


class RemoteAgent:
    """An agent on a machine that has joined, with the pipes and methods of :class:`subprocess.Popen`."""

    def __init__(self, machine: Machine) -> None:
        self.returncode: Optional[int] = None
        self._over = threading.Event()
        (read_in, self.stdin), (self.stdout, write_out), (self.stderr, write_err) = _pipe(), _pipe(), _pipe()
        self._machine = machine
        self.sources, self.sinks = {Kind.STDIN: read_in}, {Kind.STDOUT: write_out, Kind.STDERR: write_err}
        machine.call(lambda: machine.begin(self))

    def poll(self) -> Optional[int]:
        return self.returncode

    def wait(self, timeout: Optional[float] = None) -> int:
        if not self._over.wait(timeout):
            raise subprocess.TimeoutExpired("ringrun join", timeout or 0.0)
        return self.returncode or 0

    def kill(self) -> None:
        """Give it up. It ends by itself, as its stdin does."""
        self.end(-9)
        self._machine.call(lambda: self._machine.give_up(self))

    def end(self, status: int) -> None:
        if self.returncode is None:
            self.returncode = status
        self._over.set()


def _pipe() -> Tuple[IO[bytes], IO[bytes]]:
    reader, writer = os.pipe()
    return open(reader, "rb", 0), open(writer, "wb", 0)


class Machine:
    """A machine that has joined."""

    def __init__(self, spec: HostSpec, carrier: Carrier) -> None:
        self.name, self.spec, self.lost = spec.name, spec, ""
        self._carrier = carrier
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._agent: Optional[RemoteAgent] = None
        self._closing = False
        self.over = threading.Event()

    def call(self, action: Callable[[], None]) -> None:
        """Do this in the machine's thread."""
        self._calls.put(action)
        self._carrier.wake()
        if self.over.is_set():  # no thread takes it any more
            self._do_calls()

    def _do_calls(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._calls.get_nowait()()

    def drop(self) -> None:
        """Give up the connection: the machine has another one."""
        self.lost, self._carrier.ended = "it has joined again", True

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
        self._carrier.send(Kind.START)
        if self.over.is_set():
            agent.end(LOST)
            self._carrier.detach()

    def give_up(self, agent: RemoteAgent) -> None:
        """Carry nothing for an agent any more."""
        if self._agent is agent:
            self._agent = None
            self._carrier.send(Kind.STDIN)
            self._carrier.detach()

    def run(self) -> None:
        """Carry the streams of agents until the connection ends; let the launcher read what has come."""
        try:
            while not self._carrier.ended and (self._carrier.outgoing or not self._closing):
                for frame in self._carrier.turn(60.0):
                    self._take(*frame)
                self._do_calls()
            self.lost = self.lost or "its connection was closed"
        except (ProtocolError, OSError) as problem:
            self.lost = f"its connection broke: {getattr(problem, 'strerror', None) or problem}"
        until_s = monotonic() + 5.0
        with contextlib.suppress(ProtocolError, OSError):  # the connection is lost already
            self._carrier.finish(Kind.STDERR, f"\n{self.lost}\n".encode())
            self._carrier.finish(Kind.STDOUT)
            self._carrier.ended = True
            while self._carrier.has_output and monotonic() < until_s:
                self._carrier.turn(0.1)
        if self._agent is not None:
            self._agent.end(LOST)
        self._carrier.close()
        self.over.set()
        self._do_calls()

    def _take(self, kind: int, number: int, data: bytes) -> None:
        if kind == Kind.EXIT and number == self._carrier.number:
            facts = decoded(data, _EXIT)
            self._carrier.finish(Kind.STDOUT)
            self._carrier.finish(Kind.STDERR, facts["why"].encode())
            if self._agent is not None:
                self._agent.end(facts["status"])
        elif kind == Kind.TELL:
            self.lost = decoded(data, _LEAVING)["leaving"]


class Joined(Reach):
    """Starts agents on machines that have joined."""

    description = "joins with a code"
    gets_shell = is_named = False

    def __init__(self, invitation: Optional[Invitation] = None) -> None:
        if invitation is not None:
            self._machines, self.dials_port = invitation.machines, invitation.is_chosen
            self.takes = invitation.take if self.dials_port else None

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
