# ruff: noqa: PTH111, PTH207  patterns with absolute paths; pathlib raises for users without a home
"""Lists of hosts that the user has named, ``ringrun -H LIST``: files in ``~/.config/ringcomm/hosts``.

Each is a hostfile. It may name an interpreter for a host, so only this user may be able to change it
(:func:`ringcomm.storage.folders.trusted_folder`). A list contains hosts, never other lists.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import glob
import os
import re
import shlex
from pathlib import Path
from typing import List, Mapping, Optional, Pattern, Sequence, Set

from ringcomm.errors import ConfigError
from ringcomm.storage.files import read_at, read_file, write_file
from ringcomm.storage.folders import owned_names, remove, trusted_folder

from ..plan.hosts import JOIN, HostSpec, is_host_name, parse_host, parse_hostfile, refuse_joining

LIMIT_BYTES = 1 << 20
MAX_INCLUDES = 64  # files of ssh's configuration
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")
_SSH_LINE = re.compile(r"\s*(host|include)(?:\s*=\s*|\s+)(.*)", re.IGNORECASE)


def folder_of_lists(environ: Mapping[str, str]) -> Path:
    return folder_of_configuration(environ) / "hosts"


def folder_of_configuration(environ: Mapping[str, str]) -> Path:
    """Return the folder of this user's configuration for all jobs."""
    chosen = environ.get("XDG_CONFIG_HOME", "")
    above = Path(chosen if chosen.startswith("/") else os.path.expanduser("~/.config"))
    return above / "ringcomm"


def list_names(environ: Mapping[str, str]) -> List[str]:
    """Return the sorted names of this user's lists; ConfigError if another user could change the lists."""
    return names_in(folder_of_lists(environ), _NAME)


def names_in(place: Path, pattern: Pattern[str]) -> List[str]:
    """Return the sorted names of this user's files in a folder that no other user can change."""
    if not place.exists():
        return []
    try:
        with trusted_folder(place, make=False) as folder:
            return sorted(name for name, _ in owned_names(folder, pattern))
    except OSError as problem:
        raise unusable(place, problem) from None


def list_text(name: str, environ: Mapping[str, str]) -> Optional[str]:
    """Return the content of a list, or None if there is no such list."""
    path = folder_of_lists(environ) / name
    if not _NAME.fullmatch(name) or not os.path.lexists(path):
        return None
    try:
        with trusted_folder(path.parent, make=False) as folder:
            return read_at(folder, name, LIMIT_BYTES).decode("utf-8-sig")
    except OSError as problem:
        raise unusable(path, problem) from None
    except UnicodeDecodeError:
        raise ConfigError(f"The list of hosts {path} is not a text file in UTF-8.") from None


def hosts_of_list(name: str, environ: Mapping[str, str]) -> Optional[List[HostSpec]]:
    """Return the hosts of a list, or None if there is no such list. ConfigError if it is not valid."""
    text = list_text(name, environ)
    return None if text is None else parse_hostfile(text, str(folder_of_lists(environ) / name))


def with_lists(specs: Sequence[HostSpec], environ: Mapping[str, str]) -> List[HostSpec]:
    """Return the hosts with each list's name replaced by its hosts."""
    found: List[HostSpec] = []
    for spec in specs:
        refuse_joining(spec, "join")
        inside = hosts_of_list(spec.name, environ)
        if inside is not None and spec != HostSpec(spec.name):
            raise ConfigError(
                f"-H: {spec.name} is a list of hosts (`ringrun hosts show {spec.name}`): USER@ and :SLOTS "
                "are in it, not with its name. --slots-per-host N sets the slots of all its hosts."
            )
        found += [spec] if inside is None else inside
    return found


def lists_in(specs: Sequence[HostSpec], environ: Mapping[str, str]) -> List[str]:
    """Return a line for each list that ``-H`` names, since a list may have the name of a host."""
    found = [(spec.name, hosts_of_list(spec.name, environ)) for spec in specs]
    return [
        f"the list {name}: {', '.join(spec.target for spec in hosts)}" for name, hosts in found if hosts
    ]


def add_hosts(name: str, items: Sequence[str], environ: Mapping[str, str]) -> str:
    """Add hosts (``HOST[:SLOTS]``) to a list, which is made if needed, and return a line about it."""
    if not _NAME.fullmatch(name) or name in ("localhost", JOIN):
        raise ConfigError(
            f"{name!r:.80} cannot be the name of a list: it has letters, digits, - and _ only, localhost is "
            "this machine, and join machines that join. For example: ringrun hosts add lab jetson1 jetson2"
        )
    items = [item for text in items for item in text.split(",")]
    before = list_text(name, environ) or ""
    hosts = {spec.target for spec in parse_hostfile(before, name)} if before.strip() else set()
    for item in items:
        spec = parse_host(item, "ringrun hosts add")
        refuse_joining(spec, "ringrun hosts add")
        target = spec.target
        if target == name:
            raise ConfigError(f"A list and a host in it cannot both be {name}: `-H {name}` means the list.")
        if target in hosts:
            raise ConfigError(f"{name} has {target} already. First: ringrun hosts drop {name} {target}")
        hosts.add(target)
    _write(name, [*before.splitlines(), *items], environ)
    return f"{name} has {len(hosts)} host{'' if len(hosts) == 1 else 's'}: {', '.join(sorted(hosts))}"


def drop_hosts(name: str, items: Sequence[str], environ: Mapping[str, str]) -> str:
    """Remove hosts from a list, or without any host the whole list, and return a line about it."""
    rows = [(_target(line), line) for line in text_of_list(name, environ).splitlines()]
    missing = [item for item in items if item not in [target for target, _ in rows]]
    if missing:
        raise ConfigError(f"{name} has no host {missing[0]!r}. `ringrun hosts show {name}` lists its hosts.")
    kept = [(target, line) for target, line in rows if target not in items]
    if items and any(target for target, _ in kept):
        _write(name, [line for _, line in kept], environ)
        return f"{name} does not have {', '.join(items)} any more."
    place = folder_of_lists(environ)
    try:
        with trusted_folder(place, make=False) as folder:
            remove(folder, name)
    except OSError as problem:
        raise unusable(place / name, problem) from None
    return f"The list {name} is removed."


def text_of_list(name: str, environ: Mapping[str, str]) -> str:
    """Return the content of a list; ConfigError names the existing lists if there is no such list."""
    text = list_text(name, environ)
    if text is None:
        names = ", ".join(list_names(environ)) or "none yet"
        raise ConfigError(f"There is no list of hosts {name!r:.80} (there are: {names}).")
    return text


def _target(line: str) -> str:
    """Return the host in a line of a list, or ""."""
    words = line.split("#")[0].split()
    try:
        return parse_host(words[0], "").target if words else ""
    except ConfigError:
        return words[0]  # so that it can be dropped


def _write(name: str, lines: Sequence[str], environ: Mapping[str, str]) -> None:
    place = folder_of_lists(environ)
    try:
        with trusted_folder(place) as folder:
            write_file(folder, name, "".join(f"{line}\n" for line in lines).encode())
    except OSError as problem:
        raise unusable(place / name, problem) from None


def unusable(path: Path, problem: Exception) -> ConfigError:
    """Return the error for a file or folder that another user could change, or that cannot be read."""
    why = "it is a symbolic link" if path.is_symlink() else getattr(problem, "strerror", None) or problem
    if getattr(problem, "errno", None) in (errno.EROFS, errno.ENOSPC, errno.EDQUOT):
        return ConfigError(f"{path} cannot be used: {why}.")
    return ConfigError(
        f"{path} cannot be used: {why}. Lists of hosts and keys of machines are files, which with the "
        "folders above them must belong to you or to root, and others must not be able to write them "
        "(chmod go-w); nor to read keys."
    )


# -- from ssh's configuration ---------------------------------------------------------------------


def ssh_hosts(patterns: Sequence[str], path: Path) -> List[str]:
    """Return the hosts in a configuration file of ssh that match patterns like ``jetson*``, or all."""
    try:
        hosts = _read_ssh(path, path.parent, set())
    except OSError as problem:
        raise ConfigError(f"{path} cannot be read: {(problem.strerror or str(problem)).lower()}.") from None
    found = [host for host in hosts if not patterns or any(fnmatch.fnmatchcase(host, p) for p in patterns)]
    if not found:
        what = f" that matches {' or '.join(patterns)}" if patterns else ""
        raise ConfigError(f"{path} names no host{what}. It has: {', '.join(hosts) or 'none'}.")
    return found


def _read_ssh(path: Path, folder: Path, seen: Set[Path]) -> List[str]:
    """Return the names after ``Host``, without patterns, in a file and those that it includes."""
    if path in seen or len(seen) >= MAX_INCLUDES:
        return []
    seen.add(path)
    hosts: List[str] = []
    for line in read_file(path, LIMIT_BYTES).decode("utf-8", "replace").splitlines():
        found = _SSH_LINE.fullmatch(line)
        try:
            words = shlex.split(found[2], comments=True) if found else []
        except ValueError:
            continue  # an open quote
        if found and found[1].lower() == "host":
            hosts += [word for word in words if is_host_name(word) and word not in hosts]
            continue
        for pattern in words:
            for name in sorted(glob.glob(str(folder / os.path.expanduser(pattern)))):
                with contextlib.suppress(OSError):  # as ssh does
                    hosts += [host for host in _read_ssh(Path(name), folder, seen) if host not in hosts]
    return hosts
