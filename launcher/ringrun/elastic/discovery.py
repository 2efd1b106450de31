"""The hosts of an elastic job that the user's script prints (``--host-discovery-script``), with their slots.

A slot is room for one rank. A thread runs the script once a second; :mod:`.membership` decides what follows.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
from typing import Callable, Dict, List, Sequence, Tuple

from ringcomm.errors import ConfigError

from ..plan.hosts import HostSpec, parse_host

MAX_HOSTS = 1024
"""More hosts in one output are an error of the script."""
INTERVAL_S = 1.0
SCRIPT_LIMIT_S = 60.0
OUTPUT_LIMIT_BYTES = 1 << 20


def host_key(spec: HostSpec) -> str:
    """Return the name under which hosts are compared: ``user@name`` in lower case."""
    return spec.target.lower()


def parse_discovered(text: str, slots: int = 1) -> List[HostSpec]:
    """Parse a discovery script's output: a line ``host`` or ``host:slots`` for each host, `slots` where it
    has none. Empty and repeated lines do not count. ConfigError for another form, different slots of one
    host, or too many hosts.
    """
    found: Dict[str, HostSpec] = {}
    lines = [line.strip() for line in text.splitlines()]
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        where = f"line {number} of the discovery script's output"
        spec = parse_host(line, where)
        spec = spec._replace(slots=slots if spec.slots is None else spec.slots)
        other = found.setdefault(host_key(spec), spec)
        if other.slots != spec.slots:
            raise ConfigError(
                f"{where}: {spec.target} has {spec.slots} slots here and {other.slots} in an earlier line."
            )
        if len(found) > MAX_HOSTS:
            raise ConfigError(f"{where}: more than {MAX_HOSTS} hosts.")
    return list(found.values())


class DiscoveredHosts:
    """The results of a script that runs repeatedly; the last valid one counts."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._problem = ""
        self.succeeded = False  # until then a failure ends the job

    def succeed(self, output: str) -> Tuple[Sequence[HostSpec], str]:
        """Take the output of a run with exit code 0; return the hosts, and a line for the user after
        failures, or "". ConfigError if the output is not valid: treat it as a failure.
        """
        hosts = parse_discovered(output, self._slots)
        text = "the discovery script works again" if self._problem else ""
        self.succeeded, self._problem = True, ""
        return hosts, text

    def fail(self, why: str) -> str:
        """Take the reason of a failed run; return a line for the user, or "" for a repeated reason."""
        repeated, self._problem = why == self._problem, why
        return "" if repeated else f"the discovery script failed; its last hosts remain: {why}"


class ScriptError(Exception):
    """A run of the script has failed; the text says how."""


def run_script(command: str, limit_s: float, stopped: threading.Event) -> str:
    """Run a discovery script by the shell and return its stdout; setting `stopped` ends it."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, shell=True, stdin=subprocess.DEVNULL, stdout=output, stderr=errors,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = _wait(process, limit_s, stopped)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        errors.seek(0)
        data, said = output.read(OUTPUT_LIMIT_BYTES + 1), errors.read(4096).decode("utf-8", "replace").strip()
    if code is None:
        raise ScriptError(f"{command} has not ended within {limit_s:g} s")
    if code != 0:
        raise ScriptError(f"{command} ended with exit code {code}{': ' + said if said else ''}")
    if len(data) > OUTPUT_LIMIT_BYTES:
        raise ScriptError(f"{command} has written more than {OUTPUT_LIMIT_BYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ScriptError(f"{command} has written bytes that are not text in UTF-8") from None


def _wait(process: subprocess.Popen[bytes], limit_s: float, stopped: threading.Event) -> object:
    """Return the exit code; None if the time limit is exceeded or the job has ended."""
    left_s = limit_s
    while left_s > 0 and not stopped.is_set():
        try:
            return process.wait(min(0.1, left_s))
        except subprocess.TimeoutExpired:
            left_s -= 0.1
    return None


class Discovery:
    """The thread that runs the script. All callbacks run in it: `listed` after every successful run, `warned`
    with a line for the user, `failed` with the reason if the first run fails; then no further run follows.
    """

    def __init__(
        self, command: str, slots: int, listed: Callable[[Sequence[HostSpec]], None],
        warned: Callable[[str], None], failed: Callable[[str], None], interval_s: float = INTERVAL_S,
    ) -> None:  # fmt: skip
        self._command, self._interval_s = command, interval_s  # seconds between runs
        self._listed, self._warned, self._failed = listed, warned, failed
        self._results = DiscoveredHosts(slots)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ringrun-discovery", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End a running script, and the thread."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.is_set() and self._turn():
            self._stopped.wait(self._interval_s)

    def _turn(self) -> bool:
        """Run the script once; return whether to continue."""
        lines: List[str] = []
        try:
            hosts, text = self._results.succeed(run_script(self._command, SCRIPT_LIMIT_S, self._stopped))
            self._listed(hosts)
            lines.append(text)
        except (ScriptError, ConfigError, OSError) as problem:
            if self._stopped.is_set():
                return False
            if not self._results.succeeded:
                text = str(problem).rstrip(".")  # its last words are those of the script
                self._failed(f"The host discovery script failed at its first run: {text}.")
                return False
            lines.append(self._results.fail(str(problem)))
        for line in filter(None, lines):
            self._warned(line)
        return True
