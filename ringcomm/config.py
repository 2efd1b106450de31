"""The configuration: the values of the environment's variables, and the page that documents them.

There are two frozen objects: :class:`Settings`, the tunables (:mod:`.settings`), and :class:`Membership`, how
this process takes part in a job (:mod:`.membership`). The functions here read the rest, such as the variables
of other launchers. All of them read the environment by :func:`.membership.variables`, and nothing else in
ringcomm does. :func:`document` generates ``docs/configuration.md`` from the same tables, and a test compares
the two.
"""

from __future__ import annotations

from typing import List, Mapping, Optional, Tuple

from .configuration.membership import MEMBERSHIP_VARIABLES, key_of, slot_of, variables
from .configuration.membership import PREFIX as PREFIX
from .configuration.membership import Membership as Membership
from .configuration.membership import Slot as Slot
from .configuration.settings import Settings as Settings
from .configuration.settings import nearest
from .configuration.settings import parse_setting as parse_setting
from .configuration.settings import tunables as tunables


def key_from_environment(environ: Optional[Mapping[str, str]] = None) -> Optional[Tuple[bytes, str]]:
    """Return the job's key, and its certificate or "", for jobs with another rendezvous; None: no key."""
    environ = variables(environ)
    if not any(environ.get(PREFIX + name) for name in ("KEY_FD", "KEY_FILE", "KEY")):
        return None
    return key_of(environ)


def place_from_environment() -> Tuple[str, Optional[Slot]]:
    """Return the job's name, and the place in it that the launcher gave this process, if one did."""
    environ = variables(None)
    return environ.get(PREFIX + "JOB", "default"), slot_of(environ)


def host_from_environment(environ: Optional[Mapping[str, str]] = None) -> Optional[str]:
    """Return the launcher's name of this host, or None if it has given none."""
    return variables(environ).get(PREFIX + "HOST") or None


def launchers_rank_from_environment(environ: Optional[Mapping[str, str]] = None) -> Optional[int]:
    """Return ``RANK`` if ``ringrun`` started this process and its ``MASTER_*`` are unchanged, else None."""
    environ = variables(environ)
    rank = environ.get("RANK", "")
    current = ",".join(environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"))
    same_size = environ.get("WORLD_SIZE") == environ.get(PREFIX + "SIZE") != "1"
    return int(rank) if environ.get(PREFIX + "MASTER") == current and same_size and rank.isdecimal() else None


def torchrun_from_environment(size: int, environ: Optional[Mapping[str, str]] = None) -> Tuple[bool, str]:
    """Return whether torchrun or ``ringrun`` started a group's ranks on this host, and ``MASTER_ADDR``."""
    environ = variables(environ)
    here, everywhere = environ.get("LOCAL_WORLD_SIZE", ""), environ.get("WORLD_SIZE", "")
    if not everywhere.isdecimal() or size > int(everywhere):
        return False, ""
    return here == everywhere, environ.get("MASTER_ADDR", "")


def env_rendezvous_from_environment(environ: Optional[Mapping[str, str]] = None) -> Tuple[List[str], int]:
    """Return the variables of PyTorch's ``env://`` that are not set, and ``WORLD_SIZE``, or 1."""
    environ = variables(environ)
    size = environ.get("WORLD_SIZE", "")
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return [name for name in names if not environ.get(name)], int(size) if size.isdecimal() else 1


def flight_channel_from_environment(environ: Optional[Mapping[str, str]] = None) -> List[Tuple[int, int]]:
    """Return descriptors and inodes of the socket to ringrun's agent and the pipe for stacks, if any."""
    text = variables(environ).get(PREFIX + "FLIGHT_FD", "")
    pairs = [item.partition(":") for item in text.split(",")]
    if len(pairs) != 2 or not all(number.isdecimal() and inode.isdecimal() for number, _, inode in pairs):
        return []
    return [(int(number), int(inode)) for number, _, inode in pairs]


def misspelt_variables(environ: Optional[Mapping[str, str]] = None) -> List[str]:
    """Return a warning for each variable whose name is similar, but not equal, to one that is read."""
    known = [item.metadata["variable"][len(PREFIX) :] for item in tunables()]
    known += [name for name, _ in MEMBERSHIP_VARIABLES]
    found = []
    for variable in sorted(variables(environ)):
        name = variable[len(PREFIX) :]
        # Other programs may use the prefix for their own variables.
        near = nearest(name, known, 0.8) if variable.startswith(PREFIX) and name not in known else ""
        if near:
            text = f"{variable} is not a setting of ringcomm and is ignored; did you mean {PREFIX}{near}?"
            found.append(text)
    return found


def document() -> str:
    """Return the configuration page, as Markdown."""
    lines: List[str] = [
        "# Settings",
        "",
        "Give a setting as an option of `ringrun`, as an environment variable, or (without the leading "
        "dashes) as a line in [`ringrun.toml`](ringrun.md#a-file-for-a-folder). Options take precedence over "
        "variables, and variables over the file. `ringrun` passes the resulting values to all ranks. "
        "`ringrun --dry-run` shows the values that you have set, and their sources.",
        "",
        "A program can pass settings, including some without an option: "
        '`rc.init(settings=rc.Settings(algorithm="ring"))`. '
        "`init()` then ignores the variables of this table:",
        "",
        "| option | variable | default | meaning |",
        "| --- | --- | --- | --- |",
    ]
    for item in tunables():
        shown = {"False": "off", "True": "on", "": "empty"}.get(str(item.default), f"`{item.default}`")
        names = f"`{item.metadata['flag']}` | `{item.metadata['variable']}`"
        lines.append(f"| {names} | {shown} | {item.metadata['doc']} |")
    lines += ["", "## Taking part in a job", ""]
    lines += ["These variables tell a process which job it belongs to. `ringrun` sets them. To start ranks"]
    lines += ["yourself, set `RINGCOMM_SIZE`, `RINGCOMM_RENDEZVOUS` and a key ([example](machines.md)).", ""]
    lines += ["| variable | meaning |", "| --- | --- |"]
    lines += [f"| `{PREFIX}{name}` | {doc} |" for name, doc in MEMBERSHIP_VARIABLES]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(document(), end="")
