"""A program of the doctor, or of ``ringrun clean``, on each host: started, asked and ended; and that command.

Answers are taken in the forms below: a host may be compromised.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import random
import re
import selectors
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from ringcomm.errors import ProtocolError
from ringcomm.transport.nics import LOCAL, LOOPBACK, PREFERENCE, Attempt

from ..agent import shipped
from ..job.agents import failed_start
from ..job.launch import HostMaker, per_host, read_hosts
from ..plan.hosts import HostSpec, parse_hosts, refuse_joining
from ..plan.job import HostJob, parse_command
from ..plan.options import Options
from ..plan.ranks import PlannedHost
from ..reach import incoming
from ..reach.base import AT_ONCE, Doors, quoted, retry_delay_s
from ..reach.incoming import Form, amount, fields, items, maybe, one_of, row, said, table, text, whole
from ..reach.named_hosts import list_names, with_lists
from ..reach.protocol import AgentLink, with_reader
from ..reach.protocol import program as compressed
from ..show.visible import visible_line
from . import probe

START_LIMIT_S = 20.0
ANSWER_LIMIT_S = 20.0
CLEAN_LIMIT_S = 600.0  # a host may have many files to remove
END_S = 2.0
NOISE_LIMIT_BYTES = 1 << 20
LINE_LIMIT_BYTES = 1 << 24
MAX_ROWS = 10_000


def _word(value: Any) -> str:
    """Return a name like ``eth0``, quoted if it could be taken for more."""
    word: str = text(64)(value)
    return word if word.isprintable() and " " not in word else quoted(word)


def _address(value: Any) -> str:
    ipaddress.ip_address(text(64)(value))
    return str(value)


def _network(value: Any) -> List[Any]:
    """Return an address and the length of its network's prefix."""
    address, bits = row(_address, whole(0, 128))(value)
    ipaddress.ip_interface(f"{address}/{bits}")
    return [address, bits]


_BYTES = maybe(whole(0, 1 << 63))
_IFACE = fields({"name": _word, "mac": maybe(text(64, r"[\w:]*")), "addresses": items(_network, 1000)})
_FACTS = fields({
    "hostname": said(255), "machine_id": maybe(text(64, r"\w*")), "python": text(40, r"[\w.+-]+"),
    "executable": said(), "interfaces": items(_IFACE, 1000), "files": whole(-1, 1 << 63),
    "packages": table(one_of(*probe.PACKAGES), maybe(text(100, r"[\w.+!?-]+")), len(probe.PACKAGES)),
    "cpu": fields({"cores": maybe(amount), "all_cores": whole(1), "quota": maybe(amount),
                   "power_mode": maybe(said(64))}),
    "memory_bytes": _BYTES, "disks": table(said(), _BYTES, 10), "cwd_exists": incoming.flag,
})  # fmt: skip
_UNIX = re.compile(r"@ringcomm-\w{1,64}", re.ASCII)
_OFFER = fields({
    "iface": _word, "port": whole(0, 65535), "kind": one_of(*PREFERENCE, LOOPBACK, LOCAL),
    "address": lambda value: value if _UNIX.fullmatch(str(value)) else _address(value),
})  # fmt: skip
_LISTENS = fields({}, {"addresses": items(_OFFER, 1000), "machine": text(64, r"\w*"), "problem": said()})
_THINGS = one_of("package", "shipped files", "job folder", "folder of records")
_CLEANED = fields({
    "removed": items(row(_THINGS, said(8192), whole(0, 1 << 63)), MAX_ROWS),
    "kept": items(row(said(8192), said(8192)), MAX_ROWS),
})  # fmt: skip
_SPEED = incoming.number(0, 1e9)


def _attempts(command: Mapping[str, Any]) -> Form:
    """Return the form of the results of dialling, limited to the hosts and addresses of the command."""
    targets = {to["rank"]: [each["address"] for each in to["addresses"]] for to in command["targets"]}
    form = fields({
        "source": whole(), "target": one_of(*targets), "address": text(120), "port": whole(0, 65535),
        "local": text(120, r"[\w.:%@-]*"), "local_iface": _word, "remote_iface": _word,
        "kind": one_of(*PREFERENCE), "why": text(400), "mb_per_s": maybe(_SPEED), "too_slow": incoming.flag,
    })  # fmt: skip

    def attempt(value: Any) -> Attempt:
        found = Attempt(**form(value))
        if found.address not in targets[found.target]:
            raise ValueError(f"an address that was not to be dialled: {found.address[:60]!a}")
        return found

    # An address that does not answer is dialled again, until the time is over.
    return items(attempt, 100 * sum(map(len, targets.values())))


def _speeds(command: Mapping[str, Any]) -> Form:
    """Return the form of measurements, limited to the wires of the command."""
    pairs = command["pairs"]
    form = fields({
        "rank": one_of(*(pair["rank"] for pair in pairs)), "address": text(120), "iface": _word,
        **dict.fromkeys(("mb_per_s", "there_mb_per_s", "back_mb_per_s"), _SPEED),
    })  # fmt: skip
    return items(form, sum(len(pair["wires"]) for pair in pairs))


FORMS: Dict[str, Callable[[Mapping[str, Any]], Form]] = {
    "facts": lambda command: _FACTS, "listen": lambda command: _LISTENS, "clean": lambda command: _CLEANED,
    "probe": _attempts, "measure": _speeds,
}  # fmt: skip
"""The form of the answer by the kind of command, from the whole command."""


class HostProbe:
    """A program on one host, given as a module; the first line that it prints is ``MARKER``."""

    def __init__(self, host: HostJob, program: Any = probe) -> None:
        self.host = host
        self._marker = f"\n{program.MARKER}\n".encode()
        # Why it does not answer; the login shell's output before the marker.
        self.problem, self.noise = "", ""
        self.link = AgentLink(host.argv)
        self._received = b""
        # Now, and not by the threads that start programs: it parses modules, which Python 3.11 before 3.11.8
        # cannot do in several threads.
        self._program = with_reader(compressed(program))

    def start(self) -> None:
        """Log in and wait for the program's first line; retry as a job does, but only a few times."""
        host, link = self.host, self.link
        while True:
            try:
                link.launch(self._program)
            except OSError as problem:
                why = str(problem.strerror)
                self.problem = host.reach.explain_unstarted(host.name, link.argv, host.python, why)
                return
            if self._answers(time.monotonic() + START_LIMIT_S):
                return
            self.end()
            if self.problem:
                return
            self.problem = failed_start(host, link, link.poll(), lambda _: None, self.noise, False) or ""
            if self.problem:
                return
            time.sleep(retry_delay_s(link.attempt, random.random()))

    def _answers(self, until: float) -> bool:
        """Read up to the program's first line; return whether it has come. If not, `problem` may say why."""
        self._received = b"\n"  # without output of an earlier command
        while self._marker not in self._received and len(self._received) <= NOISE_LIMIT_BYTES:
            if not self._read(until):
                break
        noise, found, self._received = self._received.partition(self._marker)
        if not found and len(noise) > NOISE_LIMIT_BYTES:
            text = f"more than {NOISE_LIMIT_BYTES} bytes of output before the program's first line"
            self.problem = f"{self.host.name}: {text}."
        elif not found and time.monotonic() >= until:
            self.problem = f"{self.host.name}: no answer within {START_LIMIT_S:g} s of the login."
        lines = noise.decode("utf-8", "replace").split("\n")
        self.noise = "\n".join(line for line in lines if line.strip())
        return bool(found)

    def ask(self, limit_s: float = ANSWER_LIMIT_S, **command: Any) -> Any:
        """Send a command; return its answer in its form, or None if the host has failed."""
        if self.problem or self.link.process is None:
            return None
        self.link.put(json.dumps(command).encode() + b"\n")
        try:
            until = time.monotonic() + limit_s
            while b"\n" not in self._received and len(self._received) <= LINE_LIMIT_BYTES:
                if not self._read(until):
                    break
            line, end, self._received = self._received.partition(b"\n")
            if end:
                return incoming.decoded(line, FORMS[command["do"]](command))
        except OSError:
            pass
        except ProtocolError as problem:
            self.problem = f"{self.host.name}: its answer ({command['do']}) is not valid: {problem}."
        self.problem = self.problem or f"{self.host.name}: it stopped answering ({command['do']})."
        self.end()
        return None

    def _read(self, until: float) -> bool:
        """Read output, and send queued data meanwhile; return False at the end or after the time limit. The
        program is longer than the pipe's buffer, so a host that does not read must not block.
        """
        link = self.link
        if link.descriptor("stdout") < 0:
            return False
        events = {"stdout": selectors.EVENT_READ, "stderr": selectors.EVENT_READ}
        if link.has_outgoing:
            events["stdin"] = selectors.EVENT_WRITE
        with selectors.DefaultSelector() as selector:
            for name, event in events.items():
                if link.descriptor(name) >= 0:
                    selector.register(link.descriptor(name), event, name)
            ready = [key.data for key, _ in selector.select(max(0.0, until - time.monotonic()))]
        if "stdin" in ready:
            link.write()
        if "stderr" in ready:
            link.read_stderr()
        if "stdout" in ready:
            piece = os.read(link.descriptor("stdout"), 1 << 16)
            self._received += piece
            return bool(piece)
        return bool(ready)

    def end(self) -> None:
        """End the program by closing its stdin, and all processes that it has started here."""
        link = self.link
        link.close_stdin()
        if link.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                link.process.wait(END_S)
        link.drain_stderr()
        link.kill()
        link.close()


# ---- ringrun clean -------------------------------------------------------------------------------


def clean_hosts(options: Options, dry_run: bool) -> Tuple[str, int]:
    """Clean this machine and the hosts of the options, or of all lists; return the text and the exit code."""
    hosts = _hosts(options)
    lines = _lines("this machine", shipped.Cleaning(os.environ, dry_run).run(), dry_run)
    code = 0
    probes = [HostProbe(host, shipped) for host in hosts]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for probe, answer in zip(probes, pool.map(lambda probe: _ask(probe, dry_run), probes)):
            if answer is None:
                lines.append(f"{probe.problem}")
                code = 1
            else:
                lines += _lines(probe.host.name, answer, dry_run)
    return "\n".join(lines), code


def _hosts(options: Options) -> List[HostJob]:
    """Return the hosts other than this machine."""
    specs = read_hosts(options)
    if options.hosts is None and options.hostfile is None:
        specs = with_lists([HostSpec(name) for name in list_names(os.environ)], os.environ)
    elif options.hosts is not None:
        for spec in parse_hosts(options.hosts):
            refuse_joining(spec, "-H")
    specs = list({spec.target.lower(): spec for spec in specs}.values())
    pythons = per_host("--python", options.python, [spec.name for spec in specs])
    doors = Doors(options, None)
    by_host: Mapping[str, Mapping[Optional[str], str]] = {"python": pythons, "cwd": {}, "iface": {}}
    maker = HostMaker(parse_command(["true"]), os.environ, doors, by_host, ship_self=False)
    local = doors.find_local(specs)
    others = [spec for spec, is_local in zip(specs, local) if not is_local]
    return [maker.make(index, PlannedHost(spec, 1, 1), False) for index, spec in enumerate(others)]


def _ask(probe: HostProbe, dry_run: bool) -> Any:
    try:
        probe.start()
        return probe.ask(CLEAN_LIMIT_S, do="clean", dry_run=dry_run)
    finally:
        probe.end()


def _lines(host: str, answer: Dict[str, Any], dry_run: bool) -> List[str]:
    """Return the lines about a host, whose texts may be long or have control characters."""
    verb = "would remove" if dry_run else "removed"
    total = sum(size for _, _, size in answer["removed"])
    found = [f"{host}: {verb} {_size(total)}" if answer["removed"] else f"{host}: nothing to remove"]
    found += [f"  {what}  {path}  {_size(size)}" for what, path, size in answer["removed"]]
    found += [f"  kept  {path}: {why}" for path, why in answer["kept"]]
    return [visible_line(line) for line in found]


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB" if size_bytes >= 1e5 else f"{size_bytes / 1e3:.1f} KB"
