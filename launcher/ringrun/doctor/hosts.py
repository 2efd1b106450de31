"""Starts the doctor's program on each host, and has the programs measure what lies between them."""

from __future__ import annotations

import json
import os
import secrets
import selectors
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from ..plan.job import HostJob
from ..plan.reaching import Failure
from ..reach.protocol import program_source
from . import facts, probe

START_LIMIT_S = 20.0
ANSWER_LIMIT_S = 8.0
STREAM_S, LEAST_STREAM_S = 0.35, 0.1
STREAMS_S = 3.5
"""All rounds of streams together take no longer, unless there are very many hosts."""
END_S = 2.0
NOISE_LIMIT_BYTES = 1 << 20
LINE_LIMIT_BYTES = 1 << 26


class HostProbe:
    """The doctor's program on one host.

    Args:
        host: the host.

    Attributes:
        problem: why it does not answer, or "".
        noise: what the login shell printed before its first line.
        start_s: how long the login took, in seconds.
    """

    def __init__(self, host: HostJob) -> None:
        self.host = host
        self.problem, self.noise, self.start_s = "", "", 0.0
        self._process: Optional[subprocess.Popen[bytes]] = None
        self._received = b""

    def start(self) -> None:
        """Log in and wait for the program's first line."""
        for argv in filter(None, (self.host.argv, self.host.fallback)):
            failure = self._start(argv)
            if failure is None:
                self.problem = ""
                return
            self.problem = failure.text
            if not failure.no_python:
                return

    def _start(self, argv: Sequence[str]) -> Optional[Failure]:
        began = time.monotonic()
        self._received = b""  # what an earlier command printed is no part of this one's first line
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                list(argv), stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True
            )
        except OSError as problem:
            text = f"{self.host.name}: {argv[0]} cannot be started: {problem.strerror}"
            return Failure(text, no_python=True)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(program_source(probe, [facts]))
        except BrokenPipeError:
            pass  # it has ended; its output says why
        before: List[str] = []
        received = 0
        while before[-1:] != [probe.MARKER]:
            line = self._line(began + START_LIMIT_S, NOISE_LIMIT_BYTES)
            received += len(self._received if line is None else line) + 1
            if received > NOISE_LIMIT_BYTES:
                self.end()
                text = f"more than {NOISE_LIMIT_BYTES} bytes of output before the doctor's first line"
                return Failure(f"{self.host.name}: {text}.")
            if line is None:
                return self._explain(argv, began)
            before.append(line)
        self.noise = "\n".join(text for text in before[:-1] if text)
        self.start_s = time.monotonic() - began
        return None

    def _explain(self, argv: Sequence[str], began: float) -> Failure:
        assert self._process is not None and self._process.stderr is not None
        if time.monotonic() - began >= START_LIMIT_S:
            self.end()
            return Failure(f"{self.host.name}: no answer within {START_LIMIT_S:g} s of the login.")
        try:
            # A program that has closed its output without leaving is ended, and has no exit status then.
            said = self._process.communicate(timeout=END_S)[1].decode("utf-8", "replace")
            status: Optional[int] = self._process.returncode
        except subprocess.TimeoutExpired:
            said, status = "", None
        self.end()
        return self.host.reach.explain_start(self.host.name, argv, self.host.python, status, said)

    def ask(self, limit_s: float = ANSWER_LIMIT_S, **command: Any) -> Any:
        """Send a command; its answer, or None if the host has failed (see :attr:`problem`)."""
        if self.problem or self._process is None or self._process.stdin is None:
            return None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            line = self._line(time.monotonic() + limit_s)
            answer = None if line is None else json.loads(line)
        except (OSError, ValueError):
            answer = None
        if answer is None:
            self.problem = f"{self.host.name}: it stopped answering ({command['do']})."
            self.end()
        return answer

    def _line(self, until: float, limit_bytes: int = LINE_LIMIT_BYTES) -> Optional[str]:
        """The next line of the program's output; None at its end, when time is over, or if it is too long."""
        assert self._process is not None and self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._received:
                if len(self._received) > limit_bytes:
                    return None
                if not selector.select(max(0.0, until - time.monotonic())):
                    return None
                piece = os.read(self._process.stdout.fileno(), 1 << 16)
                if not piece:
                    return None
                self._received += piece
        line, _, self._received = self._received.partition(b"\n")
        return line.decode("utf-8", "replace")

    def end(self) -> None:
        """End the program; it ends by itself when its stdin does."""
        if self._process is None:
            return
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Dialled(NamedTuple):
    """One host has dialled one address of another.

    Attributes:
        source: index of the host that dialled.
        target: index of the host that was to answer.
        address: the address.
        iface: the name of its interface on the target.
        result: ``error``; or ``answered``, ``source``, ``rtt_ms``, ``skew_s``, ``datagrams``.
    """

    source: int
    target: int
    address: str
    iface: str
    result: Dict[str, Any]


class Examination(NamedTuple):
    """All that was found out.

    Attributes:
        hosts: the hosts' names.
        slots: the number of ranks that each would run.
        problems: by host, why it does not answer, or "".
        noises: by host, what its login shell printed.
        starts_s: by host, how long the login took.
        facts: by host, :func:`ringrun.doctor.facts.collect`, or None.
        dialled: all attempts.
        speeds: by (source, target), bytes per second, or None if nothing arrived.
    """

    hosts: List[str]
    slots: List[int]
    problems: List[str]
    noises: List[str]
    starts_s: List[float]
    facts: List[Optional[Dict[str, Any]]]
    dialled: List[Dialled]
    speeds: Dict[Tuple[int, int], Optional[float]]


def examine(hosts: Sequence[HostJob], told: Callable[[str], None] = lambda text: None) -> Examination:
    """Start a program on each host, have them dial each other, and end them.

    Args:
        hosts: the hosts; their commands are not run.
        told: called with a line about what is being done.
    """
    probes = [HostProbe(host) for host in hosts]
    with ThreadPoolExecutor(max(1, len(probes))) as pool:
        try:
            told("logging in")
            list(pool.map(HostProbe.start, probes))
            told("asking each host")
            found = list(pool.map(lambda item: item.ask(do="facts", cwd=item.host.cwd), probes))
            told("dialling between all hosts")
            dialled, targets = _dial(pool, probes, found)
            told("measuring between all pairs")
            speeds = _measure(pool, probes, dialled, targets)
        finally:
            list(pool.map(HostProbe.end, probes))
    return Examination(
        [host.name for host in hosts], [host.planned.used for host in hosts],
        [item.problem for item in probes], [item.noise for item in probes],
        [item.start_s for item in probes], found, dialled, speeds,
    )  # fmt: skip


_Targets = Dict[int, List[Dict[str, Any]]]


def _dial(
    pool: ThreadPoolExecutor, probes: Sequence[HostProbe], found: Sequence[Optional[Dict[str, Any]]]
) -> Tuple[List[Dialled], _Targets]:
    token = secrets.token_hex(16)
    listening = list(
        pool.map(lambda pair: pair[1].ask(do="listen", token=token, index=pair[0]), enumerate(probes))
    )
    targets: _Targets = {}
    for index, (known, at) in enumerate(zip(found, listening)):
        if known is not None and at is not None:
            targets[index] = [
                {
                    "host": index, "iface": iface["name"], "address": address, "mtu": iface["mtu"],
                    "port": at["ports"][0], "datagram_port": at["datagram_port"], "virtual": iface["virtual"],
                }
                for iface in known["interfaces"]
                for address, _ in iface["addresses"]
            ]  # fmt: skip

    def ask(index: int) -> List[Dialled]:
        wanted = [item for other, items in targets.items() if other != index for item in items]
        results = probes[index].ask(do="dial", targets=wanted) or [{"error": "timeout"}] * len(wanted)
        return [
            Dialled(index, item["host"], item["address"], item["iface"], result)
            for item, result in zip(wanted, results)
        ]

    rows = pool.map(ask, sorted(targets))
    return [row for each in rows for row in each], targets


def _measure(
    pool: ThreadPoolExecutor, probes: Sequence[HostProbe], dialled: Sequence[Dialled], targets: _Targets
) -> Dict[Tuple[int, int], Optional[float]]:
    """Bytes per second between all pairs in both directions, in rounds in which no host occurs twice."""
    best: Dict[Tuple[int, int], Tuple[float, str]] = {}
    for row in dialled:
        if row.result.get("answered") == row.target:
            pair, trip = (row.source, row.target), row.result["rtt_ms"][len(row.result["rtt_ms"]) // 2]
            best[pair] = min(best.get(pair, (trip, row.address)), (trip, row.address))
    speeds: Dict[Tuple[int, int], Optional[float]] = {}

    some_rounds = list(rounds(len(probes)))
    seconds = stream_s(len(some_rounds))

    def stream(pair: Tuple[int, int]) -> None:
        target = next(item for item in targets[pair[1]] if item["address"] == best[pair][1])
        answer = probes[pair[0]].ask(do="stream", target=target, seconds=seconds)
        speeds[pair] = (answer or {}).get("bytes_per_s")

    for some in some_rounds:
        list(pool.map(stream, [pair for pair in some if pair in best]))
    return speeds


def stream_s(count: int) -> float:
    """How long each stream lasts if there are so many rounds of them, in seconds. Pure."""
    return max(LEAST_STREAM_S, min(STREAM_S, STREAMS_S / max(1, count)))


def rounds(count: int) -> Iterator[List[Tuple[int, int]]]:
    """All ordered pairs of so many hosts, in rounds of pairs without a common host (the circle method). Pure.

    Args:
        count: the number of hosts.
    """
    seats = list(range(count + count % 2))  # the last seat is empty if the number is odd
    for _ in range(len(seats) - 1):
        pairs = [(seats[i], seats[-1 - i]) for i in range(len(seats) // 2)]
        kept = [pair for pair in pairs if max(pair) < count]
        yield kept
        yield [(second, first) for first, second in kept]
        seats = [seats[0], seats[-1], *seats[1:-1]]
