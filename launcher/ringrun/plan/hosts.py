"""Parser of ``-H`` lists and hostfiles. Pure: no name is resolved and no host is contacted here."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any, Dict, List, NamedTuple, NoReturn, Optional, Tuple

from ringcomm.errors import ConfigError

JOIN = "join"
"""Among hosts, in place of a name: a machine that joins with a code; its slots are the number of machines."""
MAX_SLOTS = 65535
"""Maximum of one host."""
MAX_PORT = 65535
MAX_PER_CORE = 8
"""More slots per core are probably a mistake."""
_PORTS = (22, 222, 2022, 2222, 8022, 10022, 22022, 22222)
"""Numbers of slots that are probably sshd's port, unless the host has as many cores."""


class HostSpec(NamedTuple):
    """One host as the user named it; None means: not given."""

    name: str  # host name, ssh alias or address (IPv6 without brackets)
    user: Optional[str] = None
    slots: Optional[int] = None
    python: Optional[str] = None
    cwd: Optional[str] = None
    iface: Optional[str] = None  # which interfaces ranks there may use
    max_slots: Optional[int] = None  # with --oversubscribe; None: no limit
    port: Optional[int] = None  # sshd's

    @property
    def target(self) -> str:
        """ssh's destination argument: ``user@name`` or ``name``."""
        return f"{self.user}@{self.name}" if self.user else self.name

    @property
    def joins(self) -> bool:
        """Whether it stands for machines that join with a code."""
        return self.name == JOIN and self.user is None

    @property
    def item(self) -> str:
        """The host as an item of ``-H``: with brackets and slots."""
        name = f"[{self.name}]" if ":" in self.name else self.name
        port = "" if self.port is None else f"@{self.port}"
        slots = "" if self.slots is None and not port else f":{self.slots or 1}{port}"
        return f"{self.user}@{name}{slots}" if self.user else name + slots


_FORM = "Write HOST, HOST:SLOTS, HOST:SLOTS@PORT (of its sshd), USER@HOST:SLOTS, or [IPV6]:SLOTS"
_PORT = re.compile(r"(.*:\d+)@(\d{1,5})")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\Z")
_ADDRESS = re.compile(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9_.\-]+)?\Z")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+\\\-]*\Z")
_KEYS = ("slots", "max_slots", "port", "python", "cwd", "iface")


def parse_hosts(text: str) -> List[HostSpec]:
    """Parse ``host[:slots],…``, the value of ``-H``. ConfigError names a wrong item and the valid forms."""
    items = text.split(",")
    if not text.strip():
        raise ConfigError(f"The list of hosts is empty. {_FORM}, separated by commas.")
    specs = []
    for number, item in enumerate(items, 1):
        where = f"-H item {number} of {len(items)}" if len(items) > 1 else "-H"
        if not item.strip():
            raise ConfigError(f"{where} is empty: {text!r} has one comma too many. {_FORM}.")
        specs.append(parse_host(item.strip(), where))
    return specs


def parse_hostfile(text: str, path: str) -> List[HostSpec]:
    """Parse a hostfile in MPI style: a host per line with ``slots=2`` or ``:2``; ``#`` starts a comment.
    ``python=``, ``cwd=`` and ``iface=`` override the job's values. A file in JSON is one of ``mlx.launch``: a
    list of hosts, each with ``ssh`` and ``ips``, or an object with that list. ConfigError has file and line.
    """
    if re.match(r"\s*(\{|\[\s*[\]{])", text):
        return _of_mlx(text, path)
    specs: List[HostSpec] = []
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{path}, line {number}"
        try:
            words = shlex.split(re.sub(r"\s*=\s*", "=", line), comments=True)
        except ValueError as problem:
            raise ConfigError(
                f"{where}: {line.strip()!r} cannot be parsed ({problem}). Close the quote."
            ) from None
        if words:
            specs.append(_line(words, where))
    if not specs:
        raise ConfigError(f"{path} names no host. Write one per line, like: jetson1 slots=2")
    return specs


def _of_mlx(text: str, path: str) -> List[HostSpec]:
    """Parse a hostfile of ``mlx.launch``; consecutive entries of one host become its slots."""
    try:
        found: Any = json.loads(text)
    except ValueError as problem:
        raise ConfigError(f"{path} begins like JSON and is not: {problem}.") from None
    listed = found.get("hosts") if isinstance(found, dict) else found
    if not isinstance(listed, list) or not listed:
        raise ConfigError(f'{path} names no host. Write a list like [{{"ssh": "a", "ips": ["10.0.0.1"]}}].')
    if isinstance(found, dict) and found.get("envs"):
        passed = " ".join(f"-x {item}" for item in found["envs"])
        raise ConfigError(f"{path}: envs are not taken from a hostfile. Remove them, and add: {passed}")
    specs: List[HostSpec] = []
    for number, item in enumerate(listed, 1):
        where = f"{path}, host {number}"
        if not isinstance(item, dict) or not isinstance(item.get("ssh"), str):
            raise ConfigError(f'{where}: {json.dumps(item):.60} has no "ssh", the name of the host.')
        addresses = item.get("ips") or []
        if not isinstance(addresses, list) or not all(isinstance(address, str) for address in addresses):
            raise ConfigError(f'{where}: "ips" is a list of addresses, not {json.dumps(addresses):.60}.')
        # The addresses of the interfaces that ranks on this host use.
        iface = ",".join(f"{address}/{128 if ':' in address else 32}" for address in addresses)
        spec = parse_host(item["ssh"], where)._replace(slots=1, iface=iface or None)
        if specs and specs[-1]._replace(slots=1) == spec:
            spec = specs.pop()
            spec = spec._replace(slots=(spec.slots or 0) + 1)
        specs.append(spec)
    return specs


def _line(words: List[str], where: str) -> HostSpec:
    spec = parse_host(words[0], where)
    values: Dict[str, str] = {}
    for word in words[1:]:
        key, equals, value = word.partition("=")
        key = "max_slots" if key == "max-slots" else key
        if not equals or key not in _KEYS:
            known = ", ".join(f"{name}=…" for name in _KEYS)
            raise ConfigError(f"{where}: {word!r} is not an option of a host. The options are {known}.")
        if key in values:
            raise ConfigError(f"{where}: {key}= is given twice. Keep one of them.")
        if not value:
            raise ConfigError(f"{where}: {key}= has no value. Write it right after the equals sign.")
        values[key] = value
    if "slots" in values:
        if spec.slots is not None:
            raise ConfigError(
                f"{where}: slots are given twice, as {words[0]!r} and slots=. Keep one of them."
            )
        spec = spec._replace(slots=_slots(values["slots"], where))
    if "max_slots" in values:
        most = _slots(values["max_slots"], where)
        if spec.slots is not None and most < spec.slots:
            raise ConfigError(f"{where}: max_slots={most} is less than slots={spec.slots}.")
        spec = spec._replace(max_slots=most)
    if "port" in values:
        if spec.port is not None:
            raise ConfigError(f"{where}: the port is given twice, as {words[0]!r} and port=. Keep one.")
        spec = spec._replace(port=_port(values["port"], where))
    return spec._replace(python=values.get("python"), cwd=values.get("cwd"), iface=values.get("iface"))


def parse_host(item: str, where: str) -> HostSpec:
    """Parse one ``[user@]host[:slots[@port]]``; ConfigError begins with `where`."""
    user: Optional[str] = None
    with_port = _PORT.fullmatch(item)
    port = None if with_port is None else _port(with_port[2], f"{where}: {item!r}")
    rest = item if with_port is None else with_port[1]
    if "@" in rest:
        user, rest = rest.rsplit("@", 1)
        if not _USER.match(user):
            _refuse(item, where, f"{user!r} before the @ is not a user name")
    name, slots = _split_slots(rest, item, where)
    count = None if slots is None else _slots(slots, f"{where}: {item!r}")
    return HostSpec(name, user, count, port=port)


def is_host_name(text: str) -> bool:
    """Return whether a text can be the name or the address of a host."""
    return bool(_NAME.match(text) or _ADDRESS.match(text))


def check_host(spec: HostSpec, where: str) -> None:
    """Check a host's name and account before use in a command line; ConfigError begins with `where`."""
    if not is_host_name(spec.name):
        _refuse(spec.name, where, f"{spec.name!r:.80} is neither a host name nor an address")
    if spec.user is not None and not _USER.match(spec.user):
        _refuse(spec.target, where, f"{spec.user!r} before the @ is not a user name")


def _split_slots(rest: str, item: str, where: str) -> Tuple[str, Optional[str]]:
    if rest.startswith("["):
        name, bracket, tail = rest[1:].partition("]")
        if not bracket:
            _refuse(item, where, "the bracket [ is not closed")
        if not _ADDRESS.match(name):
            _refuse(item, where, f"{name!r} inside the brackets is not an IPv6 address")
        if tail and not tail.startswith(":"):
            _refuse(item, where, f"{tail!r} after the bracket should be a colon and a number")
        return name, tail[1:] if tail else None
    if rest.count(":") > 1:
        _refuse(item, where, "it has several colons; an IPv6 address goes in brackets, like [fe80::1]:2")
    name, colon, slots = rest.partition(":")
    if not _NAME.match(name):
        _refuse(item, where, f"{name!r} is not a host name" if name else "the host name is missing")
    return name, slots if colon else None


def _slots(text: str, where: str) -> int:
    if not text.isdigit() or not text.isascii() or len(text) > 9 or not 1 <= int(text) <= MAX_SLOTS:
        raise ConfigError(
            f"{where}: {text!r} is not a number of slots. Slots are the number of ranks that may run on that "
            f"host: a whole number from 1 to {MAX_SLOTS}, like host:2 (a port for ssh comes after them, like "
            "host:2@2222; -p is that of all hosts)."
        )
    return int(text)


def _port(text: str, where: str) -> int:
    if not text.isdigit() or not text.isascii() or len(text) > 5 or not 1 <= int(text) <= MAX_PORT:
        raise ConfigError(f"{where}: {text!r} is not a port of ssh, a whole number from 1 to {MAX_PORT}.")
    return int(text)


def crowding(spec: HostSpec, cores: float) -> str:
    """Return a paragraph if a host has an unusual number of slots for its cores, or ""."""
    slots = spec.slots or 0
    is_port = slots in _PORTS and slots > cores
    if not is_port and slots <= MAX_PER_CORE * cores:
        return ""
    port = f" If {slots} is the port of its sshd, write {spec._replace(slots=1, port=slots).item}."
    return (
        f"{spec.name}: {spec.item} asks for {slots} ranks there, and it has {cores:.3g} "
        f"core{'' if cores == 1 else 's'}.{port if slots in _PORTS else ''} -np N sets the number of ranks, "
        "and --oversubscribe accepts this one."
    )


def _refuse(item: str, where: str, why: str) -> NoReturn:
    raise ConfigError(f"{where}: {item!r} is not a host: {why}. {_FORM}.")
