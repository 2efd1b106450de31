"""``ringrun ps``, ``stop``, ``add`` and ``drop``: commands to the running jobs of this user."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Sequence

from ringcomm.errors import ConfigError

from ..show.visible import visible
from .control_socket import control_folder, running_jobs, send_command

SHOWN_CHARACTERS = 8
"""Characters of a job's identifier in the table; a part of it is enough for commands."""


class RunningJob(NamedTuple):
    """What a job answers about itself.

    Attributes:
        id: its identifier.
        pid: of its launcher.
        program: the script or module.
        ranks: their number.
        hosts: their names.
        began_at: the start, in seconds of the wall clock.
        elastic: whether hosts can be added.
    """

    id: str
    pid: int
    program: str
    ranks: int
    hosts: List[str]
    began_at: float
    elastic: bool


def jobs_of(folder: Path) -> List[RunningJob]:
    """The running jobs with a socket in this directory, oldest first, but those that do not answer."""
    found = []
    for job in running_jobs(folder):
        try:
            facts: Dict[str, Any] = json.loads(send_command(folder, job, {"do": "info"}))
            found.append(RunningJob(
                job, int(facts["pid"]), str(facts["program"]), int(facts["ranks"]),
                [str(name) for name in facts["hosts"]], float(facts["began_at"]), bool(facts["elastic"]),
            ))  # fmt: skip
        except (ConfigError, ValueError, LookupError, TypeError):
            continue
    return sorted(found, key=lambda item: item.began_at)


def describe_jobs(jobs: Sequence[RunningJob], now_at: float) -> str:
    """The table of ``ringrun ps``.

    Args:
        jobs: the jobs.
        now_at: the present, in seconds of the wall clock.
    """
    if not jobs:
        return "No job of yours was started by ringrun on this machine and still runs.\n"
    rows = [("JOB", "PID", "RANKS", "RUNS FOR", "HOSTS", "PROGRAM")]
    for job in jobs:
        rows.append((
            job.id[:SHOWN_CHARACTERS], str(job.pid), str(job.ranks), _duration(now_at - job.began_at),
            visible(",".join(job.hosts)), visible(job.program),
        ))  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[5]]) for row in rows]
    return "\n".join(lines) + "\n"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def show_jobs(environ: Mapping[str, str]) -> str:
    """Run ``ringrun ps``: the text to print."""
    return describe_jobs(jobs_of(control_folder(environ)), time.time())


def stop_job(words: Sequence[str], environ: Mapping[str, str]) -> str:
    """Run ``ringrun stop [JOB]``.

    Args:
        words: the beginning of a job's identifier; without one the only running job is meant.
        environ: the environment.

    Returns:
        the job's answer.

    Raises:
        ConfigError: there is no such job, or there are several.
    """
    folder = control_folder(environ)
    jobs = jobs_of(folder)
    if not jobs:
        raise ConfigError("No job of yours was started by ringrun on this machine and still runs.")
    job = _chosen(jobs, words[0] if words else "", "ringrun stop JOB")
    return send_command(folder, job.id, {"do": "stop"})


def change_hosts(what: str, words: Sequence[str], environ: Mapping[str, str]) -> str:
    """Run ``ringrun add HOST[:SLOTS]`` or ``ringrun drop HOST``.

    Args:
        what: ``add`` or ``drop``.
        words: the host, and perhaps ``--job`` and a job's identifier.
        environ: the environment.

    Returns:
        the job's answer.

    Raises:
        ConfigError: no job or several jobs run, or the job has refused the command.
    """
    if len(words) == 3 and words[1] != "--job":
        raise ConfigError(f"{words[1]!r} is no option. Write: ringrun {what} HOST --job ID")
    folder = control_folder(environ)
    jobs = [job for job in jobs_of(folder) if job.elastic]
    if not jobs:
        raise ConfigError(
            f"No elastic job of yours runs on this machine ({folder} has no socket of one). Hosts can be "
            "added to jobs that were started with --min-np or --host-discovery-script."
        )
    job = _chosen(jobs, words[2] if len(words) == 3 else "", "--job ID")
    return send_command(folder, job.id, {"do": what, "host": words[0]})


def _chosen(jobs: Sequence[RunningJob], beginning: str, how: str) -> RunningJob:
    chosen = [job for job in jobs if job.id.startswith(beginning)]
    if len(chosen) != 1:
        names = ", ".join(f"{job.id} ({visible(job.program)})" for job in jobs)
        count = "1 job runs" if len(jobs) == 1 else f"{len(jobs)} jobs run"
        raise ConfigError(f"{count}: {names}. Name one with {how}.")
    return chosen[0]
