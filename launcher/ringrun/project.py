"""``ringrun.toml``: options for the jobs that are started in a folder and in those below it.

It may name programs and hosts, as a script does. So it is used only if no other user can change or exchange
it (:func:`ringcomm.storage.folders.trusted_folder`), and a line always lists its options. It may come with a
foreign repository: the user must confirm options that start programs here, once for each file and content.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple

import click
from click.core import ParameterSource

from ringcomm.configuration.settings import SettingValue, nearest
from ringcomm.errors import ConfigError
from ringcomm.storage.files import read_at, write_file
from ringcomm.storage.folders import trusted_folder

from .flags import Flag, settings_of
from .plan.options import INSTEAD
from .reach.base import quoted
from .reach.named_hosts import folder_of_configuration
from .show.visible import visible

NAME = "ringrun.toml"
LIMIT_BYTES = 1 << 20
PROGRAMS = ("ssh", "via", "host_discovery_script")
"""Options whose values are programs of this machine."""
_OF_HOSTS = ("hosts", "hostfile", "host_discovery_script")
"""Options that one of them on the command line replaces together."""


class Project(NamedTuple):
    """The content of a project file."""

    options: Dict[str, Any]  # by the names of click's parameters
    settings: Tuple[SettingValue, ...]
    keys: Tuple[str, ...]  # the names in the file


def with_project(
    ctx: click.Context, command: click.Command, given: Mapping[str, Any], say: Callable[[str], None]
) -> Dict[str, Any]:
    """Return the values of flags, with those of the project file where the command line has none."""
    path = None
    with contextlib.suppress(FileNotFoundError):  # the working directory is gone, which the job says
        here = Path.cwd()
        path = next((at / NAME for at in (here, *here.parents) if os.path.lexists(at / NAME)), None)
    content = None if path is None else read_trusted(path, say)
    if path is None or content is None:
        return dict(given)
    project = parse_project(content, path, command)
    typed = {name for name in given if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    replaced = set(_OF_HOSTS) if typed & set(_OF_HOSTS) else set()
    used = {
        name: value for name, value in project.options.items()
        if name in given and name not in typed | replaced and not name.startswith("tunable_")
    }  # fmt: skip
    if project.keys:
        say(f"options of {path} are used: {', '.join(project.keys)}; --no-project-file leaves them out")
    _allow_programs(path, content, {n: used[n] for n in PROGRAMS if used.get(n) not in (None, "ssh")})
    return {**given, **used, "project_values": project.settings, "project_names": tuple(used)}


def _allow_programs(path: Path, content: str, programs: Mapping[str, str]) -> None:
    """Ask the user to allow the programs of a file, once per path and content."""
    folder = folder_of_configuration(os.environ) / "project-files"
    digest = hashlib.sha256(os.fsencode(path) + b"\0" + content.encode()).hexdigest()
    if not programs or _is_known(folder, digest):
        return
    shown = ", ".join(f"{name.replace('_', '-')} = {quoted(value)}" for name, value in programs.items())
    remedy = "give such options on the command line, or leave the file out with --no-project-file"
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigError(
            f"{path} starts programs on this machine: {shown}. You have not allowed that: start ringrun once "
            f"in a terminal, which asks, {remedy}."
        )
    if not click.confirm(visible(f"{path} starts programs on this machine: {shown}. Allow it?"), err=True):
        raise ConfigError(f"{path} is not used. To go on without it, {remedy}.")
    try:
        with trusted_folder(folder) as opened:
            write_file(opened, digest, os.fsencode(path) + b"\n")
    except OSError as problem:
        text = f"{folder}, which keeps what you allow, cannot be written: {problem.strerror}."
        raise ConfigError(text) from None


def _is_known(folder: Path, digest: str) -> bool:
    """Return whether the user has allowed the programs of a file with this digest of its path and content."""
    try:
        with trusted_folder(folder, make=False) as opened:
            return bool(read_at(opened, digest, LIMIT_BYTES))
    except OSError:
        return False


def read_trusted(path: Path, say: Callable[[str], None]) -> Optional[str]:
    """Return the content of a project file; None, with a message, if another user could change it."""
    try:
        with trusted_folder(path.parent, make=False) as folder:
            return read_at(folder, path.name, LIMIT_BYTES).decode("utf-8-sig")
    except OSError as problem:
        why = problem.strerror or str(problem)
        say(f"{path} is not used: {why}. The file, its folder and those above must belong to you or to root, "
            "and others must not be able to write them (chmod go-w)")  # fmt: skip
        return None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file in UTF-8.") from None


def parse_project(content: str, path: Path, command: click.Command) -> Project:
    """Return the values in a project file with options of `command`, ``ringrun``."""
    toml = _parser(path)
    try:
        values = toml.loads(content)
    except toml.TOMLDecodeError as problem:
        raise ConfigError(f"{path}: {problem}. It has lines like: hosts = \"lab\"") from None
    words = [word for key, value in values.items() for word in _words(key, value, path, command)]
    try:
        inner = command.make_context("ringrun", [*words, "--", "true"])
    except click.UsageError as problem:
        raise ConfigError(f"{path}: {problem.format_message()}") from None
    found = {
        name: value for name, value in inner.params.items()
        if inner.get_parameter_source(name) is ParameterSource.COMMANDLINE and name != "command"
    }  # fmt: skip
    return Project(found, settings_of(found, str(path)), tuple(values))


def _parser(path: Path) -> Any:
    """Return the module that reads TOML: Python's own since 3.11."""
    for name in ("tomllib", "tomli"):
        if find_spec(name) is not None:
            return import_module(name)
    raise ConfigError(
        f"{path} cannot be read: that needs Python 3.11, or tomli on this machine (pip install tomli). "
        "--no-project-file leaves it out."
    )


def _words(key: str, value: Any, path: Path, command: click.Command) -> List[str]:
    """Return one line of the file as words of a command line."""
    known = _flags(command)
    name = key.replace("_", "-")
    if name not in known:
        near = nearest(name, known)
        hint = f"Did you mean {near}?" if near else "`ringrun --help-all` lists all."
        raise ConfigError(f"{path}: ringrun has no option {key!r} for a project. {hint}")
    option, flag = known[name]
    if isinstance(value, bool) and (option.is_switch or option.is_flag):
        return [flag] if value else option.secondary_opts[:1]
    items = value if isinstance(value, list) else [value]
    # The types themselves: bool is an int.
    if option.is_flag or not items or not all(type(item) in (str, int, float) for item in items):
        form = "true or false" if option.is_flag else f"of the form {option.metavar}"
        raise ConfigError(f"{path}: {key} = {value!r} is not {form}.")
    texts = [str(item) for item in items]
    if (option.metavar or "").split(".")[0] in ("FILE", "FOLDER"):  # relative to the file's folder
        texts = [str(path.parent / os.path.expanduser(text)) for text in texts]  # noqa: PTH111  without a home
    if option.name == "hosts":
        texts = [",".join(texts)]
    if len(texts) > 1 and not option.multiple:
        raise ConfigError(f"{path}: {key} takes one value, not a list.")
    return [word for text in texts for word in ([f"{flag}={text}"] if option.is_switch else [flag, text])]


def _flags(command: click.Command) -> Dict[str, Tuple[Flag, str]]:
    """Return the options that a project file may have, by their names without dashes."""
    return {
        name.lstrip("-"): (option, option.opts[0])
        for option in command.params
        if isinstance(option, Flag) and option.purpose != INSTEAD and option.name != "project_file"
        for name in option.opts
    }
