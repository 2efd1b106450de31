"""An elastic job as data, to which hosts and processes are added while it runs, and its limits; and the hosts
that the user's script prints (``--host-discovery-script``), with their slots (room for a rank each).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Sequence, Tuple

from ringcomm.configuration.membership import Limits
from ringcomm.errors import ConfigError

from ..plan.environment import horovod_rank_variables
from ..plan.hosts import HostSpec, parse_host, refuse_joining
from ..plan.job import HostJob, Job
from ..plan.options import ELASTIC, Options, table
from ..plan.ranks import Place, PlannedHost

MAX_HOSTS = 1024  # in one output
INTERVAL_S = 1.0  # between two runs of the script
SCRIPT_LIMIT_S = 60.0
OUTPUT_LIMIT_BYTES = 1 << 20


@dataclass(frozen=True)
class HostLimits(Limits):
    """The limits of an elastic job, and those of its hosts. `horovod` puts Horovod's name in error texts."""

    script: str = ""  # prints the available hosts; or ""
    slots: int = 1  # of a host without a number of slots
    horovod: bool = False

    @property
    def name(self) -> str:
        """The name of the launcher in error texts that programs may search for."""
        return "Horovod" if self.horovod else "ringrun"


def failed_text(limits: HostLimits, host: str, local: int, code: int) -> str:
    """Return the error if all ranks have failed, or all hosts are excluded. It names the first failure."""
    return (
        f"{limits.name} detected that one or more processes exited with non-zero status, thus causing the "
        "job to be terminated. The first process to do so was:\n"
        f"Process name: {host}[{local}]\nExit code: {code}"
    )


def timeout_text(limits: HostLimits, needed: int) -> str:
    """Return the error if too few slots or ranks were available in time."""
    return (
        "Timed out waiting for minimum number of slots to become available. Please check that you have "
        f"enough resources to run at least {needed} {limits.name} processes. "
        f"Timeout after {limits.timeout_s:g} seconds."
    )


def limits_of(options: Options) -> HostLimits:
    """Return the limits of the options of an elastic job; ConfigError if one contradicts another."""
    start_np, high = options.np or options.min_np or 1, options.max_np
    low = options.min_np or start_np
    if high is not None and high < low:
        raise ConfigError(f"--max-np {high} is less than --min-np {low}.")
    if start_np < low:
        raise ConfigError(f"-np {start_np} is less than --min-np {low}: the job could not start.")
    if high is not None and start_np > high:
        raise ConfigError(f"-np {start_np} is more than --max-np {high}.")
    return HostLimits(
        start_np, low, high, script=options.host_discovery_script or "", slots=options.slots_per_host or 1,
        horovod=options.horovod,
    )  # fmt: skip


def refuse_without_effect(options: Options) -> None:
    """Raise ConfigError for an option of elastic jobs if no option makes the job elastic."""
    elastic = [(getattr(options, item.name), row.flags[0]) for item, row in table() if row.purpose == ELASTIC]
    given = [flag for value, flag in elastic if value is not None]
    if given and not options.is_elastic:
        raise ConfigError(
            f"{given[0]} needs --min-np or --host-discovery-script: without them the number of ranks does "
            "not change."
        )


def fixed_hosts(options: Options, specs: Sequence[HostSpec]) -> List[HostSpec]:
    """Return the hosts of a job without a discovery script; without a list, this machine."""
    if not specs:
        return [HostSpec("localhost", slots=options.np or options.max_np or options.min_np)]
    found = [spec._replace(slots=spec.slots or 1) for spec in specs]
    total, needed = sum(spec.slots or 0 for spec in found), options.np or options.min_np or 1
    if total < needed:
        raise ConfigError(
            f"The hosts have {total} slot{'' if total == 1 else 's'}, but the job needs {needed} to start. "
            "Give the number of slots per host, like -H a:2,b:2, or with --slots-per-host."
        )
    return found


@dataclass(frozen=True)
class ElasticJob(Job):
    """An elastic job: ``plan.places`` are its processes, ``hosts`` its agents, `specs` the user's list."""

    limits: HostLimits = field(default_factory=HostLimits)
    specs: Tuple[HostSpec, ...] = ()
    maker: Any = None
    needs_private: bool = False  # it does not encrypt, and the user has not asked for that

    is_elastic = True
    all_local = False  # hosts of other machines may be added at any time

    def open_host(self, agent: int, spec: HostSpec, slots: int, is_local: bool) -> HostJob:
        """Add a host, whose agent has the next number, for up to `slots` processes."""
        host: HostJob = self.maker.make(agent, PlannedHost(spec, slots, slots), is_local)
        hosts, planned_hosts = self.hosts, self.plan.hosts
        assert isinstance(hosts, list) and isinstance(planned_hosts, list) and len(hosts) == agent
        hosts.append(host)
        planned_hosts.append(host.planned)
        return host

    def add_member(self, member: int, agent: int, local: int, rank: int, size: int) -> Dict[str, Any]:
        """Add a process with the next number, and return its agent's part; `rank` and `size` are a guess."""
        places = self.plan.places
        assert isinstance(places, list) and len(places) == member
        host = self.hosts[agent]
        place = Place(member, agent, local, host.planned.slots, agent, len(self.hosts))
        places.append(place)
        env = {} if not self.horovod else {
            **horovod_rank_variables(place._replace(rank=rank), size, host.name), "HOROVOD_ELASTIC": "1"
        }
        env = {name: value for name, value in env.items() if name not in host.env}
        env.update(RINGCOMM_SLOT=f"{agent}:{local}", RINGCOMM_ELASTIC="1", RINGCOMM_MEMBER=str(member))
        return {"rank": member, "env": env}

    def agent_config(self, host: HostJob) -> Dict[str, Any]:
        """Return the first message to a host's agent; processes are started later."""
        config = super().agent_config(host)
        config["env"]["RINGCOMM_SIZE"] = str(self.limits.start_np)
        return {**config, "elastic": True, "slots": host.planned.slots}


# -- the script -------------------------------------------------------------------------------


def host_key(spec: HostSpec) -> str:
    """Return the name under which hosts are compared: ``user@name`` in lower case."""
    return spec.target.lower()


def parse_discovered(text: str, slots: int = 1) -> List[HostSpec]:
    """Parse a script's output: ``host`` or ``host:slots`` per line; ConfigError for what is not valid."""
    found: Dict[str, HostSpec] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"line {number} of the discovery script's output"
        spec = parse_host(line.strip(), where)
        refuse_joining(spec, where)
        spec = spec._replace(slots=slots if spec.slots is None else spec.slots)
        other = found.setdefault(host_key(spec), spec)
        if other.slots != spec.slots:
            raise ConfigError(
                f"{where}: {spec.target} has {spec.slots} slots here and {other.slots} in an earlier line."
            )
        if len(found) > MAX_HOSTS:
            raise ConfigError(f"{where}: more than {MAX_HOSTS} hosts.")
    return list(found.values())


def run_script(command: str, limit_s: float, stopped: threading.Event) -> str:
    """Run a discovery script by the shell; ConfigError if it fails. Setting `stopped` ends it."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, shell=True, stdin=subprocess.DEVNULL, stdout=output, stderr=errors,
            start_new_session=True,
        )  # fmt: skip
        try:
            until_s = time.monotonic() + limit_s
            while process.poll() is None and time.monotonic() < until_s and not stopped.wait(0.02):
                pass
            code = process.returncode
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        errors.seek(0)
        data, said = output.read(OUTPUT_LIMIT_BYTES + 1), errors.read(4096).decode("utf-8", "replace").strip()
    if code is None:
        raise ConfigError(f"{command} has not ended within {limit_s:g} s")
    if code != 0:
        raise ConfigError(f"{command} ended with exit code {code}{': ' + said if said else ''}")
    if len(data) > OUTPUT_LIMIT_BYTES:
        raise ConfigError(f"{command} has written more than {OUTPUT_LIMIT_BYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{command} has written bytes that are not text in UTF-8") from None


class Discovery:
    """The thread that runs the script, and calls one of the three functions after each run."""

    def __init__(
        self, command: str, slots: int, listed: Callable[[Sequence[HostSpec]], None],
        warned: Callable[[str], None], failed: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._command, self._slots = command, slots
        self._listed, self._warned, self._failed = listed, warned, failed
        self._succeeded, self._problem = False, ""  # of the last run
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
            self._stopped.wait(INTERVAL_S)

    def _turn(self) -> bool:
        """Run the script once; return whether to continue."""
        try:
            text = run_script(self._command, SCRIPT_LIMIT_S, self._stopped)
            self._listed(parse_discovered(text, self._slots))
        except (ConfigError, OSError) as problem:
            why = str(problem)
            if self._stopped.is_set():
                return False
            if not self._succeeded:
                self._failed(f"The host discovery script failed at its first run: {why.rstrip('.')}.")
                return False
            if why != self._problem:
                self._warned(f"the discovery script failed; its last hosts remain: {why}")
            self._problem = why
            return True
        if self._problem:
            self._warned("the discovery script works again")
        self._succeeded, self._problem = True, ""
        return True
