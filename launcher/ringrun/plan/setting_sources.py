"""Where each setting's value comes from: a flag, a variable, a file, or its default. Pure.

Every source is turned into the same thing, :class:`Said`: which setting, its text, and how the user put it.
The settings themselves are defined once, in :class:`ringcomm.config.Settings`; flags, variables and keys
of the file are derived from that table.
"""

from __future__ import annotations

import difflib
import numbers
from dataclasses import fields, replace
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Sequence, Tuple

from ringcomm.config import Settings, parse_setting
from ringcomm.errors import ConfigError

from . import horovod
from .configfile import Line, parse_file
from .horovod import Said


class Effective(NamedTuple):
    """The settings that are in force, and for each field that is not at its default who said so."""

    settings: Settings
    sources: Dict[str, str]


def from_environment(environ: Mapping[str, str]) -> List[Said]:
    """What the ``RINGCOMM_*`` variables say."""
    found = []
    for item in fields(Settings):
        variable = item.metadata["variable"]
        if variable in environ:
            text = environ[variable]
            found.append(Said(item.name, text, f"{variable}={text!r}", variable))
    return found


def from_file(content: str, path: str) -> List[Said]:
    """What a configuration file says: settings by their names, and the sections of Horovod's files.

    Raises:
        ConfigError: a line cannot be read, or names nothing; the message has its number.
    """
    names = {item.metadata["flag"][2:]: item.name for item in fields(Settings)}
    found: List[Said] = []
    for line in parse_file(content, path):
        where = f"{path}, line {line.number}"
        if line.section:
            if not horovod.is_key(line.section, line.key):
                raise ConfigError(_unknown(line, where, horovod.keys()))
            found += horovod.from_file(line.section, line.key, line.text, where)
            continue
        flag = line.key.replace("_", "-")
        if flag in names:
            found.append(Said(names[flag], line.text, f"{where}: {line.key}: {line.text!r}", where))
        elif line.key != "controller":
            raise ConfigError(_unknown(line, where, [*names, *horovod.keys()]))
        elif line.text.lower() != "gloo":
            raise ConfigError(f"{where}: controller: {line.text!r}: {horovod.NO_MPI}")
    return found


def from_values(values: Mapping[str, Any]) -> Tuple[Said, ...]:
    """What a program says, by the names of the options (dashes or underscores) or of the fields.

    Raises:
        ConfigError: there is no such setting, or a value is of the wrong kind.
    """
    defaults = {item.name: item.default for item in fields(Settings)}
    options = {item.metadata["flag"][2:].replace("-", "_"): item.name for item in fields(Settings)}
    found: Dict[str, Any] = {}
    for said, value in values.items():
        plain = said.replace("-", "_")
        name = options.get(plain, plain)
        if name not in defaults:
            raise ConfigError(f"There is no setting {said!r}. There are: {', '.join(sorted(options))}.")
        if isinstance(value, bool) and not isinstance(defaults[name], bool):
            raise ConfigError(f"{name}={value!r}: this setting is not one to turn on or off.")
        if isinstance(defaults[name], float) and not isinstance(value, numbers.Real):
            raise ConfigError(f"{name}={value!r} is not a number.")
        found[name] = value
    return tuple(
        Said(name, str(int(value) if isinstance(value, bool) else value), f"{name}={value!r}", name)
        for name, value in found.items()
    )


def _unknown(line: Line, where: str, known: Iterable[str]) -> str:
    key = f"{line.section}.{line.key}" if line.section else line.key
    near = difflib.get_close_matches(key.replace("_", "-"), [name.replace("_", "-") for name in known], 1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"{where}: there is no setting {key!r}.{hint} `ringrun --print-config` lists all."


def effective(sources: Sequence[Iterable[Said]]) -> Effective:
    """Put the sources together; later ones win.

    Raises:
        ConfigError: a text is no value of its setting.
    """
    changes: Dict[str, Any] = {}
    origins: Dict[str, str] = {}
    for source in sources:
        for said in source:
            changes[said.name] = parse_setting(said.name, said.text, said.phrase)
            origins[said.name] = said.source
    return Effective(replace(Settings(), **changes), origins)


def once(flags: Iterable[Said]) -> List[Said]:
    """The flags, when no two of them say different things about one setting.

    Raises:
        ConfigError: two do, such as ``--fusion-threshold`` and ``--fusion-threshold-mb``.
    """
    found: Dict[str, Said] = {}
    for said in flags:
        other = found.setdefault(said.name, said)
        if other.source != said.source and other.text != said.text:
            raise ConfigError(f"{other.phrase} and {said.phrase} set the same thing. Keep one of them.")
    return list(found.values())


def shown_value(setting: str, value: Any) -> str:
    """A value in the shortest form that its parser takes."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if setting.endswith("_bytes"):
        for exponent, unit in ((3, "G"), (2, "M"), (1, "K")):
            if value and value % 1024**exponent == 0:
                return f"{value // 1024**exponent}{unit}"
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def describe(found: Effective) -> str:
    """The table that ``--print-config`` shows: every setting, its value, and where that comes from."""
    rows: List[Tuple[str, str, str]] = [("setting", "value", "from")]
    for item in fields(Settings):
        shown = shown_value(item.name, getattr(found.settings, item.name)) or '""'
        origin = found.sources.get(item.name, "default")
        rows.append((item.metadata["flag"][2:], shown, origin))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}" for name, value, origin in rows]
    return "\n".join(lines) + "\n"
