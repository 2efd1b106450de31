"""The variables that define a process's part in a job. :mod:`.config` reads them."""

from __future__ import annotations

from typing import List, Mapping, Optional, Tuple

# The variables that are not settings, without the prefix, and their meaning.
MEMBERSHIP_VARIABLES = (
    ("SIZE", "Number of ranks. 1: this process is the whole job. Unset: so it is, unless `srun` or "
     "`mpirun` has started it with others."),
    ("RENDEZVOUS", "The address of the rendezvous: `host:port`, or several separated by commas; those behind "
     "a semicolon are dialled only if none before it answers. Without `ringrun` a "
     "process on that host that asks for rank 0 or for none serves it, if one address is given; otherwise "
     "`python -m ringcomm.rendezvous` must be running there."),
    ("RENDEZVOUS_MACHINE", "An identifier of the machine that serves the rendezvous, set by `ringrun`. Other "
     "machines do not dial addresses of the rendezvous that are their own too (like docker0's)."),
    ("RANK", "The rank this process asks for. Unset: the rendezvous assigns one."),
    ("KEY_FILE", "A file that holds the job's key in hex digits, the same on every host; "
     "`python -m ringcomm.newkey FILE` makes one. Only its owner may be able to read it. If a "
     "certificate is in it too, all TCP connections are encrypted."),
    ("KEY", "The key itself. A file is better: other users may see environments."),
    ("KEY_FD", "A descriptor that holds the key; `ringrun` passes it."),
    ("KEY_READER", "The process that has read the key from that descriptor, which programs that it starts do "
     "not inherit. Such a process sets it for these."),
    ("JOB", "The job's name. Ranks of another job are refused."),
    ("SHARED_DIR", "A directory that all hosts share, by which ranks that `srun` or Open MPI's `mpirun` has "
     "started find rank 0. Unset: `~/.ringcomm`."),
    ("HOST", "The name of this host in messages. Unset: its hostname."),
    ("SLOT", "`HOST_INDEX:SLOT`, the place that `ringrun` gave this process."),
    ("MASTER", "The values of `MASTER_ADDR`, `MASTER_PORT` and `WORLD_SIZE` that `ringrun` has set. As long "
     "as they are unchanged, `torch.distributed` finds the other ranks through the job's own rendezvous."),
    ("FLIGHT_FD", "A socket and a pipe to `ringrun`, which requests flight records there."),
    ("ELASTIC", "`1`: the job is elastic: ranks may be lost and may join while it runs. "
     "`python -m ringcomm.rendezvous --min-np N` serves such a job. `SIZE` does not count then."),
    ("MEMBER", "In an elastic job, the number that the launcher gave this process. Unset: the rendezvous "
     "gives one."),
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
