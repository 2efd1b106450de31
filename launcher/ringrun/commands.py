"""The commands beside running a job: ``ringrun ps``, ``stop``, ``doctor``, ``hosts`` and so on.

Their modules are imported only when they are run. A job is named first, or by ``--job JOB``.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, NoReturn, Optional, Tuple

import click

from ringcomm.errors import ConfigError, RingcommError

from .flags import options_of, with_doctor_options, with_host_options, with_project_option
from .plan.hosts import MAX_SLOTS
from .reach import named_hosts
from .show.visible import visible

_JOB = click.option("--job", metavar="JOB", default="", help="The job, in place of the argument.")
BRIEF = (
    ("hosts", "Named lists."),
    ("clean", "Remove old files."),
    ("doctor -H HOST,…", "Examine hosts."),
    ("join [CODE]", "Join a job."),
    ("ps", "List running jobs."),
    ("stop [JOB]", "End a job."),
    ("add [JOB] HOST", "Add a host."),
    ("drop [JOB] HOST", "Drop a host."),
    ("diagnose FOLDER", "Explain failures."),
    ("completion SHELL", "For your shell."),
)
"""The lines of ``ringrun --help``."""


@click.group("ringrun", context_settings={"help_option_names": ["-h", "--help"]})
def commands() -> None:
    """Commands beside running a job."""


def say(text: str, problem: bool = False) -> None:
    """Print text that may contain words of a job, or of a file."""
    click.echo(visible(f"ringrun: {text}" if problem else text), err=problem, nl=not text.endswith("\n"))


def note(text: str) -> None:
    """Print a line about an action."""
    say(f"{text}.", problem=True)


def answer(ask: Callable[[], Tuple[str, int]], failed: int = 1) -> NoReturn:
    """Print an answer, or why there is none, and exit with the answer's code, or with `failed`."""
    try:
        text, code = ask()
    except RingcommError as problem:
        say(str(problem), problem=True)
        raise SystemExit(failed) from None
    if text:
        say(text)
    raise SystemExit(code)


@commands.command()
def ps() -> None:
    """Show your running jobs on this machine."""
    from .job.control import show_jobs

    def ask() -> Tuple[str, int]:
        text, problems = show_jobs(os.environ)
        for problem in problems:
            say(problem, problem=True)
        return text, 1 if problems else 0

    answer(ask)


def _one_name(argument: str, option: str) -> str:
    """Return the prefix of a job's identifier, from the argument or ``--job``."""
    if argument and option:
        raise click.UsageError("The job is named twice.")
    return argument or option


@commands.command()
@_JOB
@click.option("-y", "--yes", is_flag=True, help="End the only running job without a question.")
@click.argument("beginning", metavar="[JOB]", default="")
def stop(job: str, yes: bool, beginning: str) -> None:
    """End a running job of yours, as SIGTERM does.

    JOB is its identifier in `ringrun ps`, or the beginning of that. Without it the only running job is meant:
    on a terminal a question comes first, and elsewhere --yes is needed.
    """
    from .job.control import stop_job

    name = _one_name(beginning, job)
    answer(lambda: (stop_job(name, os.environ, lambda *found: yes or _agreed(*found)), 0))


def _agreed(job: str, program: str) -> bool:
    """Ask whether to end the only running job."""
    if not sys.stdin.isatty():
        named = f"Name it as in `ringrun stop {job}`, or give --yes"
        raise ConfigError(f"1 job runs: {job} ({program}). {named}.")
    return click.confirm(f"End {job} ({program})?", err=True)


@commands.command()
@click.option("--stay", is_flag=True, help="Serve all jobs of launchers that this machine has met.")
@click.option("--name", metavar="NAME", default="", help="This machine's name in the job [its host name].")
@click.option("--slots", metavar="N", type=click.IntRange(1, MAX_SLOTS), default=1,
              help="Most ranks here [1].")  # fmt: skip
@click.option("--cores", metavar="N", type=click.IntRange(1, MAX_SLOTS),
              help="Most cores that they use [all].")  # fmt: skip
@click.option("-y", "--yes", is_flag=True, help="Run what the launcher asks for without a question.")
@click.argument("words", metavar="[HOST:PORT] [CODE]", nargs=-1)
def join(
    words: Tuple[str, ...], stay: bool, name: str, slots: int, cores: Optional[int], yes: bool
) -> NoReturn:
    """Give this machine to a job of another one, which shows the code for it (ringrun -H localhost,join).

    What the job runs is shown first, and a question follows. It runs with your rights. Without HOST:PORT the
    launcher is looked for in this network; without CODE it is asked for, or read from stdin. Both machines
    keep a key: with --stay, this one then serves jobs with join:NAME among their hosts, without a question.
    """
    from .join.command import join as take_part

    has_terminal = sys.stdin.isatty()

    def ask(text: str) -> bool:
        note(text)
        return yes or click.confirm("Run it?", err=True)

    def read_code() -> str:
        return str(click.prompt("Code", err=True)) if has_terminal else sys.stdin.readline(200)

    def run() -> Tuple[str, int]:
        if not (yes or has_terminal):
            raise ConfigError("What the job runs is asked about, and there is no terminal. Give --yes.")
        return "", take_part(words, name, slots, cores, stay, note, read_code, ask)

    answer(run, failed=2)


@commands.command()
@_JOB
@click.argument("names", metavar="[JOB] HOST[:SLOTS]", nargs=-1, required=True)
def add(job: str, names: Tuple[str, ...]) -> None:
    """Add a host, or a list of hosts, to a running elastic job.

    A host that is excluded is taken back. JOB is needed if several elastic jobs run.
    """
    _change_hosts("add", names, job)


@commands.command()
@_JOB
@click.argument("names", metavar="[JOB] HOST", nargs=-1, required=True)
def drop(job: str, names: Tuple[str, ...]) -> None:
    """Drop a host of a running elastic job.

    Its ranks leave at the next step. JOB is needed if several elastic jobs run.
    """
    _change_hosts("drop", names, job)


def _change_hosts(what: str, names: Tuple[str, ...], job: str) -> NoReturn:
    """Have a job add or drop a host: the last name, after the prefix of the job's identifier or alone."""
    from .job.control import change_hosts

    if len(names) > 2:
        raise click.UsageError("Name one host, after the job if several run: [JOB] HOST.")
    beginning = _one_name(names[0] if len(names) == 2 else "", job)
    answer(lambda: (change_hosts(what, names[-1], beginning, os.environ), 0))


@commands.command()
@click.argument("folder")
def diagnose(folder: str) -> None:
    """Explain the flight records of a failed job.

    They show which ranks waited for which. FOLDER is the one that ringrun has named. Exit code 1 if a file
    is damaged, 2 if there is none.
    """
    from .diagnosis.records import diagnose_folder

    answer(lambda: diagnose_folder(Path(folder)), failed=2)


@commands.command(epilog="A program of this name is started by its path: ringrun ./doctor.")
@with_doctor_options
@with_project_option
@click.option("--json", "as_data", is_flag=True, help="Print everything as JSON.")
@click.pass_context
def doctor(ctx: click.Context, /, as_data: bool, project_file: bool, **given: Any) -> NoReturn:
    """Find what keeps hosts from training together.

    Logs in to all hosts, asks each for its interfaces, processors, memory, limits and packages, has them dial
    each other as the ranks of a job do, and measures every pair on the route that a job takes. Each problem
    comes with what to do. Exit code 0 if no problem was found (notes are none), otherwise 1.
    """
    from .doctor.report import run_doctor
    from .project import with_project

    def ask() -> Tuple[str, int]:
        values = with_project(ctx, ctx.obj, given, note) if project_file else given
        return run_doctor(replace(options_of(values), ship_self=False), as_data)

    answer(ask, failed=2)


@commands.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]), metavar="bash|zsh|fish")
@click.pass_obj
def completion(command: click.Command, shell: str) -> None:
    """Print a script for completion in a shell.

    For bash, add this line to ~/.bashrc: eval "$(ringrun completion bash)"
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(command, {}, "ringrun", "_RINGRUN_COMPLETE").source())


# -- lists of hosts, and leftovers on hosts -----------------------------------------------------

_LIST = click.argument("name", metavar="LIST")


@commands.group(invoke_without_command=True)
@click.pass_context
def hosts(ctx: click.Context, /) -> None:
    """Keep lists of hosts, for -H LIST. Without a command: show them, and known machines (ringrun join).

    Each is a hostfile of its own in ~/.config/ringcomm/hosts, where python=, cwd=, iface= and slots= can be
    given for a host. `ringrun doctor -H LIST` examines its hosts.
    """
    if ctx.invoked_subcommand is None:
        answer(lambda: (_all_lists(), 0))


def _all_lists() -> str:
    from .join.proof import MACHINES, known_launchers, known_names

    lines = []
    names = named_hosts.list_names(os.environ)
    width = max(map(len, names), default=0)
    for name in names:
        try:
            text = ", ".join(spec.item for spec in named_hosts.hosts_of_list(name, os.environ) or ())
        except ConfigError as problem:
            text = f"cannot be used: {problem}"
        lines.append(f"{name:<{width}}  {text}")
    found = [f"They are in {named_hosts.folder_of_lists(os.environ)}."]
    if not lines:
        found = ["There is no list of hosts yet. Make one: ringrun hosts add lab localhost jetson1 jetson2"]
    machines = "machines that have joined, for -H join:NAME"
    for known, text in ((known_names(MACHINES), machines), (known_launchers(), "launchers")):
        found += [f"Known {text}: {', '.join(known)}"] if known else []
    return "\n".join([*lines, *found])


@hosts.command("show")
@_LIST
def show_list(name: str) -> NoReturn:
    """Show a list as it is in its file."""
    answer(lambda: (named_hosts.text_of_list(name, os.environ), 0))


@hosts.command("add")
@_LIST
@click.argument("items", metavar="HOST[:SLOTS]…", nargs=-1, required=True)
def add_to_list(name: str, items: Tuple[str, ...]) -> NoReturn:
    """Add hosts to a list. It is made where there is none."""
    answer(lambda: (named_hosts.add_hosts(name, items, os.environ), 0), failed=2)


@hosts.command("drop")
@_LIST
@click.argument("items", metavar="[HOST…]", nargs=-1)
def drop_from_list(name: str, items: Tuple[str, ...]) -> NoReturn:
    """Drop hosts from a list, or the whole list."""
    answer(lambda: (named_hosts.drop_hosts(name, items, os.environ), 0), failed=2)


@hosts.command("forget")
@click.argument("name", metavar="NAME")
def forget_machine(name: str) -> NoReturn:
    """Forget the key of a machine that has joined, or of a launcher. It needs a code again."""
    from .join.proof import forget

    answer(lambda: (forget(name), 0), failed=2)


@hosts.command("import")
@_LIST
@click.argument("patterns", metavar="PATTERN…", nargs=-1)
def import_hosts(name: str, patterns: Tuple[str, ...]) -> NoReturn:
    """Add the hosts of ~/.ssh/config that match, like 'jetson*'.

    Without a pattern the hosts that it has are shown.
    """
    def ask() -> Tuple[str, int]:
        path = Path(os.path.expanduser("~/.ssh/config"))  # noqa: PTH111  users without a home
        found = named_hosts.ssh_hosts(patterns, path)
        if not patterns:
            text = f"{path} has: {', '.join(found)}\nSay which, like: ringrun hosts import {name} {found[0]}"
            return text, 2
        return named_hosts.add_hosts(name, found, os.environ), 0

    answer(ask, failed=2)


@commands.command()
@with_host_options
@click.option("--dry-run", is_flag=True, help="Show what would be removed; remove nothing.")
def clean(dry_run: bool, **given: Any) -> NoReturn:
    """Remove caches, old job folders and records of failures.

    On this machine, and on the hosts of -H; without it on those of all lists of `ringrun hosts`. Job folders
    are the copies that --ship makes, with what ranks have written there. What a running job uses stays.
    """
    from .doctor.hosts import clean_hosts

    answer(lambda: clean_hosts(options_of(given), dry_run), failed=2)
