"""Generated command line flags: one for every setting, and horovodrun's flags."""

from __future__ import annotations

import difflib
import re
from dataclasses import fields
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    Optional,
    Tuple,
    TypeVar,
)  # fmt: skip

import click

from ringcomm.config import Settings, parse_setting
from ringcomm.errors import ConfigError

from .plan import horovod, mpirun
from .plan.horovod import SettingValue
from .plan.setting_sources import shown_value

BY_HAND = ("iface", "verbose")
"""Settings whose flags are declared in :mod:`ringrun.cli`: ``--iface HOST=SPEC`` is given per host."""

if TYPE_CHECKING:  # a class with parameters for type checkers only, and only in new versions
    _ParamType = click.ParamType[Any]
else:
    _ParamType = click.ParamType

_Command = TypeVar("_Command", bound=Callable[..., Any])


class _Text(_ParamType):
    """A flag's value that is validated by its setting's parser and becomes a :class:`SettingValue`."""

    name = "value"

    def __init__(self, setting: str, flag: str, convert: horovod.Convert) -> None:
        self.setting, self.flag, self.make = setting, flag, convert

    def convert(self, value: Any, param: Optional[click.Parameter], ctx: Optional[click.Context]) -> Any:
        if isinstance(value, SettingValue):
            return value
        converted = self.make(value)
        if converted is None:
            return None
        try:
            parse_setting(self.setting, converted, repr(value))
        except ConfigError as problem:
            self.fail(str(problem), param, ctx)
        return SettingValue(self.setting, converted, f"{self.flag} {value}", self.flag)


def _same(text: str) -> str:
    return text


def _metavar(setting: str) -> str:
    units = {"bytes": "BYTES", "s": "S", "ms": "MS", "us": "US", "log": "FILE"}
    units.update(dict.fromkeys(("capacity", "recorder", "every"), "N"), threads="N|none")
    return units.get(setting.rpartition("_")[2], "FILE" if setting == "timeline" else "NAME")


def summary(doc: str) -> str:
    """The first sentence of a setting's description, for ``--help``."""
    first = re.split(r"(?<=\.) (?=[A-Z])|(?<=[a-z]): ", doc, maxsplit=1)[0]
    return first.replace("`", "").rstrip(".:") + "."


def _native() -> Iterator[click.Option]:
    for item in fields(Settings):
        flag, default = item.metadata["flag"], item.default
        if item.name in BY_HAND:
            continue
        shown = "" if default == "" or default is False else f" [{shown_value(item.name, default)}]"
        text = summary(item.metadata["doc"]) + shown
        if isinstance(default, bool):
            names = [f"{flag}/--no-{flag[2:]}", f"tunable_{item.name}"]
            yield _Tunable(names, default=None, help=text, callback=_switch(item.name, flag))
        else:
            kind = _Text(item.name, flag, _same)
            yield _Tunable([flag, f"tunable_{item.name}"], type=kind, metavar=_metavar(item.name), help=text)


class _Tunable(click.Option):
    """A flag of a setting; ``--help`` lists these in a section of their own."""


def _switch(setting: str, flag: str) -> Callable[..., Any]:
    def convert(ctx: click.Context, param: click.Parameter, value: Optional[bool]) -> Optional[SettingValue]:
        if value is None:
            return None
        written = flag if value else f"--no-{flag[2:]}"
        return SettingValue(setting, str(int(value)), written, written)

    return convert


def _aliases() -> Iterator[click.Option]:
    for index, name in enumerate(horovod.NAMES):
        if name.flag and name.is_flag:
            names, callback = [name.flag, f"tunable_alias{index}"], _flag_callback(name)
            yield click.Option(names, is_flag=True, default=None, hidden=True, callback=callback)
        elif name.flag:
            kind = _Text(name.setting, name.flag, name.convert)
            yield click.Option([name.flag, f"tunable_alias{index}"], type=kind, hidden=True)


def _flag_callback(name: horovod.Name) -> Callable[..., Any]:
    def convert(ctx: click.Context, param: click.Parameter, value: Optional[bool]) -> Optional[SettingValue]:
        text = name.convert("1") if value else None
        return None if text is None else SettingValue(name.setting, text, name.flag, name.flag)

    return convert


def _without_setting() -> Iterator[click.Option]:
    for flag in (*horovod.REFUSED, *horovod.IGNORED):
        count = horovod.VALUES.get(flag, 0)
        callback = _refuse if flag in horovod.REFUSED else _note
        if count:
            yield click.Option(
                [flag, _name(flag)], nargs=count, hidden=True, expose_value=False, callback=callback
            )
        else:
            yield click.Option(
                [flag, _name(flag)], is_flag=True, hidden=True, expose_value=False, callback=callback
            )


def _name(flag: str) -> str:
    return "horovodrun_" + flag.strip("-").replace("-", "_")


def _refuse(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    if value:
        raise click.UsageError(f"{param.opts[0]}: {horovod.REFUSED[param.opts[0]]}", ctx)


def _note(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    reason = horovod.IGNORED[param.opts[0]]
    if value and reason and not ctx.resilient_parsing:
        click.echo(f"ringrun: {param.opts[0]} has no effect: {reason}.", err=True)


def with_generated(command: _Command) -> _Command:
    """Add the generated flags to a click command; their values are passed as ``tunable_*`` arguments."""
    made: List[click.Option] = [*_native(), *_aliases(), *_without_setting()]
    holder: Any = command
    holder.__click_params__ = [*getattr(holder, "__click_params__", []), *reversed(made)]
    return command


def split_setting_values(given: Mapping[str, Any]) -> Tuple[Tuple[SettingValue, ...], Dict[str, Any]]:
    """Split a command's arguments into the values of the generated flags and the other arguments."""
    values = [value for name, value in given.items() if name.startswith("tunable_") and value is not None]
    rest = {name: value for name, value in given.items() if not name.startswith("tunable_")}
    return tuple(values), rest


def refuse_unknown(ctx: click.Context, word: str, known: Mapping[str, int]) -> None:
    """Refuse an option that does not exist, and name the nearest one that does and has an effect.

    Args:
        ctx: of the command.
        word: the option as it was written.
        known: ringrun's own options, with their numbers of values.

    Raises:
        click.UsageError: there is no such option, or one of mpirun's lacks its values.
    """
    name = word.partition("=")[0]
    if name in known or (not word.startswith("--") and word[:2] in known):  # the second: -iFILE
        return
    count = mpirun.values_of(name)
    if count:
        raise click.UsageError(f"{name} takes {count} value{'s' if count > 1 else ''}.", ctx)
    raise click.UsageError(f"No such option {name!r}. Did you mean {nearest(name, known)!r}?", ctx)


def nearest(name: str, known: Iterable[str]) -> str:
    """The option most like a name, among those that have an effect.

    Args:
        name: the option as it was written.
        known: ringrun's own options.
    """
    useless = {*horovod.REFUSED, *horovod.IGNORED}
    options = sorted({*mpirun.names(), *known} - useless, key=lambda option: option.startswith("--"))
    bare = {option.lstrip("-"): option for option in options}
    best = difflib.get_close_matches(name.lstrip("-"), sorted(bare), n=1, cutoff=0.0)
    return bare[best[0]]


def write_options(command: click.Command, ctx: click.Context, formatter: click.HelpFormatter) -> None:
    """Write the options for ``--help``: options of the job first, then the settings."""
    own: List[Tuple[str, str]] = []
    settings: List[Tuple[str, str]] = []
    for param in command.get_params(ctx):
        record = param.get_help_record(ctx)
        if record is not None and isinstance(param, click.Option):
            (settings if isinstance(param, _Tunable) else own).append(record)
    with formatter.section("Options"):
        formatter.write_dl(own)
    with formatter.section(
        "Settings (also RINGCOMM_* variables and --config-file; horovodrun's names work too)"
    ):
        formatter.write_dl(settings)
