"""The variables of this process: those of the environment, or those assigned in their place."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import Dict, Iterator, Mapping, Optional

PREFIX = "RINGCOMM_"

# The variables that are not settings, without the prefix, and their meaning.
MEMBERSHIP_VARIABLES = (
    ("SIZE", "Number of ranks. 1, or unset without `srun` and `mpirun`: this process is the whole job."),
    ("RENDEZVOUS", "Address of the rendezvous: `host:port`, or several separated by commas; those after a "
     "semicolon are tried if none before it answers. Without `ringrun`, the process on that host that asks "
     "for rank 0 or for none serves it, if one address is given. Otherwise start "
     "`python -m ringcomm.rendezvous` there."),
    ("RENDEZVOUS_MACHINE", "Identifier of the machine that serves the rendezvous. Other machines skip "
     "addresses that they have themselves (like docker0's)."),
    ("RANK", "The rank that this process asks for. Unset: the rendezvous assigns one."),
    ("KEY_FILE", "File with the job's key in hex digits, the same on every host and readable by its owner "
     "only; `python -m ringcomm.newkey FILE` makes one. With a certificate in it, all TCP connections are "
     "encrypted."),
    ("KEY", "The key itself. Prefer a file: other users may see environments."),
    ("KEY_FD", "Descriptor of the key, from `ringrun`."),
    ("KEY_READER", "Process that has read the key from that descriptor. Programs that it starts do not "
     "inherit the key."),
    ("JOB", "Name of the job. Ranks of another job are refused."),
    ("SHARED_DIR", "Directory that all hosts share, where ranks started by `srun` or Open MPI's `mpirun` "
     "find rank 0. Unset: `~/.ringcomm`."),
    ("HOST", "Name of this host in messages. Unset: its hostname."),
    ("SLOT", "`HOST_INDEX:SLOT`, the place that `ringrun` gave this process."),
    ("MASTER", "The values of `MASTER_ADDR`, `MASTER_PORT` and `WORLD_SIZE` that `ringrun` has set. While "
     "they are unchanged, `torch.distributed` uses the job's own rendezvous."),
    ("FLIGHT_FD", "Socket and pipe by which `ringrun` requests flight records."),
    ("ELASTIC", "`1`: the job is elastic, and `SIZE` has no effect. "
     "`python -m ringcomm.rendezvous --min-np N` serves such a job."),
    ("MEMBER", "Number of this process in an elastic job. Unset: the rendezvous gives one."),
    ("RESTART", "How often `ringrun --restarts` has started the job again: 0 the first time."),
)  # fmt: skip

_assigned: Dict[str, str] = {}


def variables(environ: Optional[Mapping[str, str]]) -> Mapping[str, str]:
    """Return ``environ``, else the variables assigned to this process, else those of the environment."""
    if environ is not None:
        return environ
    if not _assigned:
        return os.environ
    replaced = {PREFIX + name for name, _ in MEMBERSHIP_VARIABLES}
    return {**{name: value for name, value in os.environ.items() if name not in replaced}, **_assigned}


def assign(variables: Mapping[str, str]) -> None:
    """Give this process its part in a job without a launcher, as Ray, Dask and Spark do.

    The ``RINGCOMM_*`` variables take the place of those in the environment, but are not written to it: child
    processes do not inherit them, in particular not the key. No variables: read the environment again.
    """
    global _assigned
    _assigned = dict(variables)


def export(variables: Mapping[str, Optional[str]]) -> None:
    """Set variables of this process, for the user's function and its child processes; None removes one."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def exported(variables: Mapping[str, Optional[str]]) -> Iterator[None]:
    """Set variables as :func:`export` does, within a ``with`` block."""
    before = {name: os.environ.get(name) for name in variables}
    export(variables)
    try:
        yield
    finally:
        export(before)
