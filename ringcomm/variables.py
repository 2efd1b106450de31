"""The variables that say how a process takes part in a job. :mod:`.config` reads them."""

from __future__ import annotations

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
     "`python -m ringcomm.newkey FILE` makes one. If a certificate is in it too, all TCP connections are "
     "encrypted."),
    ("KEY", "The key itself. A file is better: other users may see environments."),
    ("KEY_FD", "A descriptor that holds the key; `ringrun` passes it."),
    ("JOB", "The job's name. Ranks of another job are refused."),
    ("HOST", "What this host is called in messages. Unset: its hostname."),
    ("SLOT", "`HOST_INDEX:SLOT`, the place that `ringrun` gave this process."),
    ("FLIGHT_FD", "A socket and a pipe to `ringrun`, which asks there what the rank is doing."),
    ("RESTART", "How often `ringrun --restarts` has started the job again: 0 the first time."),
)  # fmt: skip
"""Those that are no settings, without the prefix, and what they mean."""
