"""``ringrun ps``, ``stop``, ``add`` and ``drop``: commands to the running jobs of this user."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Sequence, Tuple

from ringcomm.errors import ConfigError

from ..show.visible import columns, visible_line
from ..watch.table import duration
from .control_socket import control_folder, running_jobs, send_command

SHOWN_CHARACTERS = 8
"""Characters of a job's identifier in the table; commands accept a prefix."""
NO_JOB = "No job of yours was started by ringrun on this machine and still runs."


class RunningJob(NamedTuple):
    """A job's answer to ``info``; `pid` is its launcher's, `began_at` in seconds of the wall clock."""

    id: str
    pid: int
    program: str
    ranks: int
    hosts: List[str]
    began_at: float
    elastic: bool


def jobs_of(folder: Path) -> Tuple[List[RunningJob], List[str]]:
    """Return the running jobs with a socket in this directory, oldest first, and problems with others.
    ConfigError if the directory cannot be read, or other users can write it.
    """
    found, problems = [], []
    for job in running_jobs(folder):
        try:
            facts: Dict[str, Any] = json.loads(send_command(folder, job, {"do": "info"}))
            found.append(RunningJob(
                job, int(facts["pid"]), str(facts["program"]), int(facts["ranks"]),
                [str(name) for name in facts["hosts"]], float(facts["began_at"]), bool(facts["elastic"]),
            ))  # fmt: skip
        except ConfigError as problem:
            problems.append(str(problem))
        except (ValueError, LookupError, TypeError, OverflowError):
            problems.append(f"The job {job} does not answer: what it says of itself is not valid.")
    return sorted(found, key=lambda item: item.began_at), problems


def describe_jobs(jobs: Sequence[RunningJob], now_at: float) -> str:
    """Return the table of ``ringrun ps``; `now_at` in seconds of the wall clock."""
    if not jobs:
        return f"{NO_JOB}\n"
    rows = [("JOB", "PID", "RANKS", "RUNS FOR", "HOSTS", "PROGRAM")]
    for job in jobs:
        rows.append((
            job.id[:SHOWN_CHARACTERS], str(job.pid), str(job.ranks), duration(now_at - job.began_at),
            visible_line(",".join(job.hosts)), visible_line(job.program),
        ))  # fmt: skip
    widths = [max(columns(row[column]) for row in rows) for column in range(5)]
    lines = [
        "  ".join([*(cell + " " * (width - columns(cell)) for cell, width in zip(row, widths)), row[5]])
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def show_jobs(environ: Mapping[str, str]) -> Tuple[str, List[str]]:
    """Run ``ringrun ps``: return the text to print, and problems. It raises as :func:`jobs_of` does."""
    jobs, problems = jobs_of(control_folder(environ))
    return describe_jobs(jobs, time.time()) if jobs or not problems else "", problems


def stop_job(beginning: str, environ: Mapping[str, str], agree: Callable[[str, str], bool]) -> str:
    """Run ``ringrun stop`` and return the job's answer. `beginning` is a prefix of the identifier; if it is
    "" and one job runs, ``agree(identifier, program)`` decides. ConfigError if it disagrees, no single job
    matches, or the job does not answer.
    """
    folder = control_folder(environ)
    jobs, problems = jobs_of(folder)
    job = _chosen(jobs, problems, beginning)
    if not beginning and not agree(job.id, visible_line(job.program)):
        raise ConfigError(f"The job {job.id} continues.")
    return send_command(folder, job.id, {"do": "stop"})


def change_hosts(what: str, host: str, beginning: str, environ: Mapping[str, str]) -> str:
    """Run ``ringrun add HOST[:SLOTS]`` or ``ringrun drop HOST`` (`what`) and return the job's answer.
    `beginning` is a prefix of the identifier; "" means the only running elastic job. ConfigError if no single
    job matches, or the job refuses.
    """
    folder = control_folder(environ)
    jobs, problems = jobs_of(folder)
    elastic = [job for job in jobs if job.elastic]
    if beginning:
        job = _chosen(jobs, problems, beginning)
    elif elastic:
        job = _chosen(elastic, [], "")
    else:
        told = "".join(f"\n{problem}" for problem in problems)
        raise ConfigError(
            f"No elastic job of yours runs on this machine ({folder} has no socket of one). Hosts join "
            f"and leave jobs that were started with --min-np or --host-discovery-script.{told}"
        )
    if not job.elastic:
        raise ConfigError(
            f"The job {job.id} is not elastic: its hosts stay. Start it with --min-np or "
            "--host-discovery-script to change them."
        )
    return send_command(folder, job.id, {"do": what, "host": host})


def _chosen(jobs: Sequence[RunningJob], problems: Sequence[str], beginning: str) -> RunningJob:
    """Return the only job with this prefix."""
    chosen = [job for job in jobs if job.id.startswith(beginning)]
    if len(chosen) == 1:
        return chosen[0]
    if not jobs:
        text = NO_JOB
    elif not chosen:
        text = f"No running job of yours begins with {visible_line(beginning)!r}. {_listed(jobs)}."
    else:
        text = f"{_listed(chosen)}. Name one as in `ringrun stop JOB`."
    raise ConfigError("\n".join([text, *problems]))


def _listed(jobs: Sequence[RunningJob]) -> str:
    names = ", ".join(f"{job.id} ({visible_line(job.program)})" for job in jobs)
    return f"{'1 job runs' if len(jobs) == 1 else f'{len(jobs)} jobs run'}: {names}"
