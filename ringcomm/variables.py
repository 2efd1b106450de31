"""The variables that say how a process takes part in a job. :mod:`.config` reads them."""

from __future__ import annotations

from typing import Mapping, Optional, Tuple

MEMBERSHIP_VARIABLES = (
    ("SIZE", "Number of ranks. Unset or 1: this process is the whole job."),
    ("RENDEZVOUS", "Where the ranks meet: `host:port`, or several separated by commas; those behind a "
     "semicolon are dialled only if none before it answers. Without `ringrun` a "
     "process on that host that asks for rank 0 or for none serves it, if one address is given; otherwise "
     "`python -m ringcomm.rendezvous` must."),
    ("RENDEZVOUS_MACHINE", "The machine at which they meet, as `ringrun` calls it. On others, addresses of "
     "the rendezvous that they have themselves (like docker0's) are not dialled."),
    ("RANK", "The rank this process asks for. Unset: the rendezvous assigns one."),
    ("KEY_FILE", "A file that holds the job's key in hex digits, the same on every host; "
     "`python -m ringcomm.newkey FILE` makes one. Only its owner may be able to read it. If a "
     "certificate is in it too, all TCP connections are encrypted."),
    ("KEY", "The key itself. A file is better: other users may see environments."),
    ("KEY_FD", "A descriptor that holds the key; `ringrun` passes it."),
    ("JOB", "The job's name. Ranks of another job are refused."),
    ("HOST", "What this host is called in messages. Unset: its hostname."),
    ("SLOT", "`HOST_INDEX:SLOT`, the place that `ringrun` gave this process."),
    ("MASTER", "What `ringrun` has set `MASTER_ADDR`, `MASTER_PORT` and `WORLD_SIZE` to. Where that still "
     "holds, `torch.distributed` finds the other ranks through the job's own rendezvous."),
    ("FLIGHT_FD", "A socket and a pipe to `ringrun`, which asks there what the rank is doing."),
    ("RESTART", "How often `ringrun --restarts` has started the job again: 0 the first time."),
)  # fmt: skip
"""Those that are no settings, without the prefix, and what they mean."""


def torchrun(environ: Mapping[str, str], size: int) -> Tuple[bool, str]:
    """What torchrun's variables say of a group's ranks: (all are on this host, ``MASTER_ADDR``).

    Args:
        size: of the group. If that is more ranks than the variables know of, or there are none: (False, "").
    """
    here, everywhere = environ.get("LOCAL_WORLD_SIZE", ""), environ.get("WORLD_SIZE", "")
    if not everywhere.isdigit() or size > int(everywhere):
        return False, ""
    return here == everywhere, environ.get("MASTER_ADDR", "")


def launchers_rank(environ: Mapping[str, str]) -> Optional[int]:
    """What ``RANK`` says, if ``ringrun`` has started this process and its ``MASTER_*`` are still in force."""
    names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
    rank = environ.get("RANK", "")
    said = ",".join(environ.get(name, "") for name in names)
    same_size = environ.get("WORLD_SIZE") == environ.get("RINGCOMM_SIZE") != "1"
    if environ.get("RINGCOMM_MASTER") != said or not same_size or not rank.isdigit():
        return None
    return int(rank)
