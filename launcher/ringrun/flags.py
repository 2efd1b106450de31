"""The flags of the command line and their help, made from the tables of options and of settings."""

from __future__ import annotations

import itertools
import re
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Sequence, Tuple, TypeVar

import click

from ringcomm.configuration.settings import SettingValue, nearest, parse_setting, tunables
from ringcomm.errors import ConfigError

from .plan import launchers, options
from .plan.environment import shown_value

JOB_OPTIONS = ("iface", "verbose")
"""Settings whose flags are options of the job: ``--iface HOST=SPEC`` is given per host."""

_NAME_COLUMNS, _HALF_COLUMNS = 19, 41
"""Columns of ``--help``: of a name, and of the left half. Both halves fit into 80."""

_Command = TypeVar("_Command", bound=Callable[..., Any])


def _checked(setting: str) -> Callable[[Any, Any, Any], Any]:
    """Return the callback of a setting's flag: its parser must take the text."""

    def check(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        try:
            if value is not None:
                parse_setting(setting, value, repr(value))
        except ConfigError as problem:
            raise click.BadParameter(str(problem), ctx, param) from None
        return value

    return check


class Flag(click.Option):
    """A flag with its section of the help; a switch may stand alone, and its value follows "="."""

    def __init__(
        self, names: Sequence[str], purpose: str, brief: str = "", is_switch: bool = False, **more: Any
    ) -> None:
        if is_switch:
            more["flag_value"] = "."
        super().__init__(names, **more)
        self.purpose, self.brief, self.is_switch = purpose, brief, is_switch

    def names(self) -> List[str]:
        """Return its names, the last one with its value."""
        names = [*self.opts, *self.secondary_opts]
        metavar = self.metavar or "|".join(getattr(self.type, "choices", ()))
        value = f"[={metavar}]" if self.is_switch else "" if self.is_flag else f" {metavar}"
        return [*names[:-1], names[-1] + value]

    @property
    def row(self) -> Tuple[str, str]:
        """Its name and description in ``--help``: of a flag without a value the long name, else the first."""
        long = [name for name in self.opts if name.startswith("--")]
        if self.is_flag or self.is_switch:
            return (long or self.opts)[0], self.brief
        metavar = (self.metavar or "").replace("[HOST=]", "")
        return f"{self.opts[0]} {metavar if '|' not in metavar else 'HOW'}", self.brief


class _Whole(click.IntRange):
    """A whole number; click's own type reports "not a valid integer range" for other text."""

    name = "whole number"


def _type(option: options.Option) -> Any:
    number = click.FloatRange(min=0, min_open=True) if option.kind == options.NUMBER else None
    whole = _Whole(*option.within) if option.kind == options.WHOLE else None
    return click.Choice(option.choices) if option.choices else whole or number


def _job_options(only: Callable[[options.Option], bool]) -> Iterator[click.Option]:
    for item, option in options.table():
        if only(option):
            many = option.kind in (options.TEXTS, options.PER_HOST, options.VARIABLES)
            yield Flag(
                [*option.flags, item.name], option.purpose, option.brief, help=option.doc.replace("`", ""),
                metavar=option.metavar or None, type=_type(option), multiple=many,
                default=None if many else item.default,
                is_flag=option.kind == options.FLAG, is_switch=option.kind == options.SWITCH,
            )  # fmt: skip


def options_of(given: Mapping[str, Any]) -> options.Options:
    """Return the options of a job from the values of flags by click's parameter names."""
    job = {item.name: given[item.name] for item, _ in options.table() if item.name in given}
    project: Dict[str, Any] = {name: given.get(name, ()) for name in ("project_values", "project_names")}
    return options.Options(setting_values=settings_of(given), **project, **job)


def settings_of(given: Mapping[str, Any], source: str = "") -> Tuple[SettingValue, ...]:
    """Return the settings among the values of flags; `source` is "" for the flags themselves."""
    found = []
    for item in tunables():
        value, flag = given.get(f"tunable_{item.name}"), item.metadata["flag"]
        if isinstance(value, bool):
            written = flag if value else f"--no-{flag[2:]}"
            found.append(SettingValue(item.name, str(int(value)), written, source or written))
        elif value is not None:
            found.append(SettingValue(item.name, value, f"{flag} {value}", source or flag))
    return tuple(found)


def _settings() -> Iterator[click.Option]:
    for item in tunables():
        flag, default = item.metadata["flag"], item.default
        if item.name in JOB_OPTIONS:
            continue
        shown = "" if default == "" or default is False else f" [{shown_value(item.name, default)}]"
        more: Dict[str, Any] = {"purpose": options.SETTINGS, "brief": item.metadata["brief"]}
        first = re.split(r"(?<=\.) (?=[A-Z`'-])|(?<=[a-z]): ", item.metadata["doc"], maxsplit=1)[0]
        more["help"] = f"{first.replace('`', '').rstrip('.:')}.{shown}"
        if isinstance(default, bool):
            yield Flag([f"{flag}/--no-{flag[2:]}", f"tunable_{item.name}"], default=None, **more)
        else:
            more["metavar"] = item.metadata["metavar"] or "NAME"
            yield Flag([flag, f"tunable_{item.name}"], callback=_checked(item.name), **more)


def with_job_options(command: _Command) -> _Command:
    """Decorator: add all options of a job, and the settings' flags, to a click command."""
    return _with(command, [*_job_options(lambda option: True), *_settings()])


def with_doctor_options(command: _Command) -> _Command:
    """Decorator: add the job's options that the doctor has to a click command."""
    return _with(command, _job_options(lambda option: option.doctor))


def with_host_options(command: _Command) -> _Command:
    """Decorator: add the options that name and reach hosts to a click command."""
    named = ("-H", "--hostfile", "--python", "--via", "--ssh", "-p", "-i")
    return _with(command, _job_options(lambda option: option.flags[0] in named))


def with_project_option(command: _Command) -> _Command:
    """Decorator: add the option that disables ``ringrun.toml`` to a click command."""
    names = ["--project-file/--no-project-file"]
    text = "Use the nearest ringrun.toml, in this folder or above [yes]."
    return _with(command, [Flag(names, options.SETTINGS, is_flag=True, default=True, help=text)])


def _with(command: _Command, made: Iterable[click.Option]) -> _Command:
    holder: Any = command
    holder.__click_params__ = [*getattr(holder, "__click_params__", []), *reversed(list(made))]
    return command


def nearest_option(name: str, known: Iterable[str]) -> str:
    """Return the option most like a name, among those with an effect; or ""."""
    ordered = sorted({*launchers.names(), *known}, key=lambda option: option.startswith("--"))
    bare = {option.lstrip("-"): option for option in ordered}
    return bare.get(nearest(name.lstrip("-"), sorted(bare)), "")


def refuse_unknown(ctx: click.Context, word: str, known: Mapping[str, int]) -> None:
    """Raise a UsageError for an unknown option, or for one of another launcher without its values."""
    name = word.partition("=")[0]
    if name in known or (not word.startswith("--") and word[:2] in known):  # the second: -iFILE
        return
    rule = launchers.rule_of(name)
    if name in launchers.REFUSED:
        raise click.UsageError(f"{name}: {launchers.NO_MPI}", ctx)
    if rule is not None and rule.values:
        raise click.UsageError(f"{name} takes {rule.values} value{'s' if rule.values > 1 else ''}.", ctx)
    near = nearest_option(name, known)
    hint = f"Did you mean {near!r}?" if near else f"'{ctx.command_path} --help-all' lists all."
    raise click.UsageError(f"No such option {name!r}. {hint}", ctx)


def write_options(command: click.Command, ctx: click.Context, formatter: click.HelpFormatter) -> None:
    """Write all options, grouped by purpose, for ``--help-all``."""
    for purpose, flags in by_purpose(command, ctx).items():
        with formatter.section(purpose):
            formatter.write_dl([(", ".join(flag.names()), flag.help or "") for flag in flags], col_max=34)


def brief_help(command: click.Command, ctx: click.Context, rows: Sequence[Tuple[str, str]]) -> str:
    """Return the subcommands (`rows`) and the most used options, in two columns."""
    half = (len(rows) + 1) // 2
    lines = ["Subcommands:", *_beside(_table(rows[:half]), _table(rows[half:]))]
    blocks = []
    for purpose, flags in by_purpose(command, ctx).items():
        blocks.append([f"{purpose}:", *_table([flag.row for flag in flags if flag.brief])])
    heights = [sum(map(len, blocks[:count])) for count in range(len(blocks) + 1)]
    best = min(range(len(blocks)), key=lambda count: max(heights[count], heights[-1] - heights[count]))
    left, right = blocks[:best], blocks[best:]
    return "\n".join([*lines, *_beside([line for block in left for line in block],
                                       [line for block in right for line in block])]) + "\n"  # fmt: skip


def _table(rows: Sequence[Tuple[str, str]]) -> List[str]:
    return [f"  {name:<{_NAME_COLUMNS}} {text}" for name, text in rows]


def _beside(left: Sequence[str], right: Sequence[str]) -> List[str]:
    pairs = itertools.zip_longest(left, right, fillvalue="")
    return [f"{first:<{_HALF_COLUMNS}}{second}".rstrip() for first, second in pairs]


def by_purpose(command: click.Command, ctx: click.Context) -> Dict[str, List[Flag]]:
    """Return the visible flags of a command, grouped by purpose."""
    found: Dict[str, List[Flag]] = {purpose: [] for purpose in options.PURPOSES}
    for param in command.get_params(ctx):
        if isinstance(param, Flag) and not param.hidden:
            found[param.purpose].append(param)
    return found


def document(command: click.Command) -> str:
    """Return the tables of options in ``docs/ringrun.md``: the purposes, except the settings' flags."""
    lines: List[str] = []
    for purpose, flags in by_purpose(command, click.Context(command)).items():
        lines += [f"**{purpose}**", "", "| option | meaning |", "| --- | --- |"]
        for flag in flags:
            if not (flag.name or "").startswith("tunable_"):
                names = ", ".join(f"`{name}`" for name in flag.names())
                cells = [text.replace("|", "\\|") for text in (names, flag.help or "")]
                lines.append(f"| {cells[0]} | {cells[1]} |")
        lines.append("")
    return "\n".join(lines)
