"""Runs the host discovery script of an elastic job once a second, in a thread."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
from typing import Callable, List, Sequence

from ringcomm.errors import ConfigError

from ..elastic.discovery import DiscoveredHosts
from ..plan.hosts import HostSpec

INTERVAL_S = 1.0
SCRIPT_LIMIT_S = 60.0
OUTPUT_LIMIT_BYTES = 1 << 20


class ScriptError(Exception):
    """A run of the script has failed; the text says how."""


def run_script(command: str, limit_s: float, stopped: threading.Event) -> str:
    """Run a discovery script by the shell and return its stdout; setting `stopped` ends it.
    :class:`ScriptError` if it fails, exceeds `limit_s` seconds, or writes more than 1 MiB or no text.
    """
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
