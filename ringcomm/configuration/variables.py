"""The variables that define a process's part in a job. :mod:`.config` reads them."""

from __future__ import annotations

from typing import List, Mapping, Optional, Tuple

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


def torchrun(environ: Mapping[str, str], size: int) -> Tuple[bool, str]:
    """Return whether torchrun started all of a group's ranks on this host, and ``MASTER_ADDR``.

    (False, "") if ``WORLD_SIZE`` is smaller than the group, or not set.
    """
    here, everywhere = environ.get("LOCAL_WORLD_SIZE", ""), environ.get("WORLD_SIZE", "")
    if not everywhere.isdecimal() or size > int(everywhere):
        return False, ""
    return here == everywhere, environ.get("MASTER_ADDR", "")


def launchers_rank(environ: Mapping[str, str]) -> Optional[int]:
    """Return ``RANK`` if ``ringrun`` started this process and its ``MASTER_*`` are unchanged."""
    names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
    rank = environ.get("RANK", "")
    current = ",".join(environ.get(name, "") for name in names)
    same_size = environ.get("WORLD_SIZE") == environ.get("RINGCOMM_SIZE") != "1"
    if environ.get("RINGCOMM_MASTER") != current or not same_size or not rank.isdecimal():
        return None
    return int(rank)


def env_rendezvous(environ: Mapping[str, str]) -> Tuple[List[str], int]:
    """Return the variables of PyTorch's ``env://`` that are not set, and ``WORLD_SIZE``, or 1."""
    size = environ.get("WORLD_SIZE", "")
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return [name for name in names if not environ.get(name)], int(size) if size.isdecimal() else 1
