"""Parser of ``-H`` lists and hostfiles. Pure: no name is resolved and no host is contacted here."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any, Dict, List, NamedTuple, Optional

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
    machine: Optional[str] = None  # a known machine that joins

    @property
    def target(self) -> str:
        """ssh's destination argument: ``user@name`` or ``name``."""
        return f"{self.user}@{self.name}" if self.user else self.name

    @property
    def joins(self) -> bool:
        """Whether it stands for machines that join with a code, or for a known one."""
        return self.name == JOIN and self.user is None

    @property
    def item(self) -> str:
        """The host as an item of ``-H``: with brackets and slots."""
        name = f"[{self.name}]" if ":" in self.name else self.name
        port = "" if self.port is None else f"@{self.port}"
        if self.machine is not None:
            return f"{name}:{self.machine}{port}"
        slots = "" if self.slots is None and not port else f":{self.slots or 1}{port}"
        return f"{self.user}@{name}{slots}" if self.user else name + slots


_FORM = (
    "Write HOST, HOST:SLOTS, HOST:SLOTS@PORT (of its sshd), USER@HOST:SLOTS, or [IPV6]:SLOTS. Slots are the "
    f"number of ranks that may run there, from 1 to {MAX_SLOTS}"
)
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.\-]*"
_ADDRESS = r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(?:%[A-Za-z0-9_.\-]+)?"
_USER = r"[A-Za-z0-9_][A-Za-z0-9_.+\\\-]*"
_HOST = re.compile(
    rf"(?:(?P<user>{_USER})@)?(?:(?P<name>{_NAME})|\[(?P<address>{_ADDRESS})\])"
    r"(?::(?P<slots>[0-9]{1,9})(?:@(?P<port>[0-9]{1,5}))?)?"
)
_KNOWN = re.compile(
    rf"{JOIN}:(?P<machine>(?![0-9]+(?:@|$))[A-Za-z0-9][A-Za-z0-9_-]{{0,62}})(?:@(?P<port>[0-9]{{1,5}}))?"
)
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


def parse_host(item: str, where: str) -> HostSpec:
    """Parse one ``[user@]host[:slots[@port]]``; ConfigError begins with `where`."""
    known, found = _KNOWN.fullmatch(item), _HOST.fullmatch(item)
    if known is not None:
        port = _number(known["port"], MAX_PORT, f"{where}: {item!r}") if known["port"] else None
        return HostSpec(JOIN, port=port, machine=known["machine"])
    if found is None:
        raise ConfigError(f"{where}: {item!r} is not a host. {_FORM}.")
    slots = None if found["slots"] is None else _number(found["slots"], MAX_SLOTS, f"{where}: {item!r}")
    port = None if found["port"] is None else _number(found["port"], MAX_PORT, f"{where}: {item!r}")
    return HostSpec(found["name"] or found["address"], found["user"], slots, port=port)


def _number(text: str, most: int, where: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", text) or not 1 <= int(text) <= most:
        raise ConfigError(f"{where}: {text!r} is not a whole number from 1 to {most}. {_FORM}.")
    return int(text)


def is_host_name(text: str) -> bool:
    """Return whether a text can be the name or the address of a host."""
    return re.fullmatch(f"{_NAME}|{_ADDRESS}", text) is not None


def check_host(spec: HostSpec, where: str) -> None:
    """Check a host's name and account before use in a command line; ConfigError begins with `where`."""
    if not is_host_name(spec.name) or not re.fullmatch(_USER, spec.user or "user"):
        raise ConfigError(f"{where}: {spec.target!r:.80} is not a host. {_FORM}.")


def parse_hostfile(text: str, path: str) -> List[HostSpec]:
    """Parse a hostfile in MPI style, with a host per line, or one of ``mlx.launch``, which is JSON."""
    if re.match(r"\s*(\{|\[\s*[\]{])", text):
        return _of_mlx(text, path)
    specs: List[HostSpec] = []
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{path}, line {number}"
        try:
            words = shlex.split(re.sub(r"\s*=\s*", "=", line), comments=True)
        except ValueError as problem:
            raise ConfigError(f"{where}: {line.strip()!r} cannot be parsed ({problem}).") from None
        if words:
            specs.append(_line(words, where))
    if not specs:
        raise ConfigError(f"{path} names no host. Write one per line, like: jetson1 slots=2")
    return specs


def _line(words: List[str], where: str) -> HostSpec:
    spec = parse_host(words[0], where)
    given: Dict[str, Any] = {"slots": spec.slots, "port": spec.port}
    for word in words[1:]:
        key, _, value = word.replace("max-slots", "max_slots").partition("=")
        if key not in _KEYS or not value or given.get(key) is not None:
            known = ", ".join(f"{name}=…" for name in _KEYS)
            raise ConfigError(f"{where}: {word!r} is not an option of a host: {known}, each once.")
        most = {"slots": MAX_SLOTS, "max_slots": MAX_SLOTS, "port": MAX_PORT}.get(key)
        given[key] = value if most is None else _number(value, most, where)
    if (given.get("max_slots") or MAX_SLOTS) < (given["slots"] or 0):
        raise ConfigError(f"{where}: max_slots={given['max_slots']} is less than slots={given['slots']}.")
    return spec._replace(**given)


def _of_mlx(text: str, path: str) -> List[HostSpec]:
    """Parse a hostfile of ``mlx.launch``; consecutive entries of one host become its slots."""
    form = f'{path} is not a list of hosts like [{{"ssh": "a", "ips": ["10.0.0.1"]}}]'
    try:
        found: Any = json.loads(text)
    except ValueError as problem:
        raise ConfigError(f"{form}: {problem}.") from None
    listed = found.get("hosts") if isinstance(found, dict) else found
    if not isinstance(listed, list) or not listed:
        raise ConfigError(f"{form}.")
    if isinstance(found, dict) and found.get("envs"):
        passed = " ".join(f"-x {item}" for item in found["envs"])
        raise ConfigError(f"{path}: envs are not taken from a hostfile. Remove them, and add: {passed}")
    specs: List[HostSpec] = []
    for number, item in enumerate(listed, 1):
        name, addresses = (item.get("ssh"), item.get("ips") or []) if isinstance(item, dict) else (None, [])
        if not isinstance(name, str) or not isinstance(addresses, list):
            raise ConfigError(f"{form}: see host {number}.")
        # The addresses of the interfaces that ranks on this host use.
        iface = ",".join(f"{address}/{128 if ':' in str(address) else 32}" for address in addresses)
        spec = parse_host(name, f"{path}, host {number}")._replace(slots=1, iface=iface or None)
        if specs and specs[-1]._replace(slots=1) == spec:
            spec = spec._replace(slots=(specs.pop().slots or 0) + 1)
        specs.append(spec)
    return specs


def crowding(spec: HostSpec, cores: float) -> str:
    """Return a paragraph if a host has an unusual number of slots for its cores, or ""."""
    slots = spec.slots or 0
    if slots <= MAX_PER_CORE * cores and not (slots in _PORTS and slots > cores):
        return ""
    port = f" If {slots} is the port of its sshd, write {spec._replace(slots=1, port=slots).item}."
    return (
        f"{spec.name}: {spec.item} asks for {slots} ranks there, and it has {cores:.3g} "
        f"core{'' if cores == 1 else 's'}.{port if slots in _PORTS else ''} -np N sets the number of ranks, "
        "and --oversubscribe accepts this one."
    )
