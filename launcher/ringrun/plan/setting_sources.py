"""Settings from a launcher's options, and their values and sources for the user. Pure.

Every source is parsed into :class:`ringcomm.configuration.settings.SettingValue`, and merged there.
"""

from __future__ import annotations

import numbers
from typing import Any, Dict, List, Mapping, Tuple

from ringcomm.configuration.settings import Effective, SettingValue, tunables
from ringcomm.errors import ConfigError


def from_values(values: Mapping[str, Any]) -> Tuple[SettingValue, ...]:
    """Return the settings of a dictionary by option names (with dashes or underscores) or field names."""
    defaults = {item.name: item.default for item in tunables()}
    options = {item.metadata["flag"][2:].replace("-", "_"): item.name for item in tunables()}
    found: Dict[str, Any] = {}
    for key, value in values.items():
        plain = key.replace("-", "_")
        name = options.get(plain, plain)
        if name not in defaults:
            raise ConfigError(f"There is no setting {key!r}. The settings are: {', '.join(sorted(options))}.")
        if isinstance(value, bool) and not isinstance(defaults[name], bool):
            raise ConfigError(f"{name}={value!r}: this setting does not take True or False.")
        if isinstance(defaults[name], float) and not isinstance(value, numbers.Real):
            raise ConfigError(f"{name}={value!r} is not a number.")
        found[name] = value
    return tuple(
        SettingValue(name, str(int(value) if isinstance(value, bool) else value), f"{name}={value!r}", name)
        for name, value in found.items()
    )


def shown_value(setting: str, value: Any) -> str:
    """Return a value in the shortest form that its parser takes."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if setting.endswith("_bytes"):
        for exponent, unit in ((3, "G"), (2, "M"), (1, "K")):
            if value and value % 1024**exponent == 0:
                return f"{value // 1024**exponent}{unit}"
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def rows_of(found: Effective) -> List[Tuple[str, str, str]]:
    """Return the name, value and source of every setting."""
    rows = []
    for item in tunables():
        shown = shown_value(item.name, getattr(found.settings, item.name)) or '""'
        origin = found.sources.get(item.name, "default")
        rows.append((item.metadata["flag"][2:], shown, origin))
    return rows
