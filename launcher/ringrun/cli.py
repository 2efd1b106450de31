"""The command line. The modules that run a job are imported only when a job is run.

:mod:`ringrun.flags` makes the options from their tables; here are those that replace a run.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Mapping, NoReturn, Optional, Sequence, Set, Tuple

import click
from click.shell_completion import CompletionItem

from ringcomm.errors import ConfigError, Misuse, RingcommError
from ringcomm.version import __version__

from . import flags
from .commands import BRIEF, commands, note
from .flags import Flag
from .plan import launchers
from .plan.options import INSTEAD, Options
from .project import with_project
from .show.visible import visible

if TYPE_CHECKING:
    from .job.outcome import Outcome
    from .job.supervise import Attempts
    from .plan.hosts import HostSpec
    from .plan.job import Command, Job
    from .reach.base import Reach

FLUSH_S = 5.0
_USAGE = """\
Usage: ringrun [OPTIONS] COMMAND [ARGS]…   COMMAND: train.py, -m module, program
       ringrun SUBCOMMAND [OPTIONS] …      --help after it shows its options
"""
_NOTES = (
    "In a job of Slurm the hosts are those of that job.",
    "Settings are variables, too, like RINGCOMM_LATE_AFTER; all options may stand in ringrun.toml. Names of "
    "horovodrun, mpirun and torchrun work as well.",
    "A program that is named like a command is started by its path: ./stop.",
)
"""Further text of ``--help-all``."""
_NO_OPTION = ("--", "-", "-m")
"""Words that begin like options, and end ringrun's options."""
_EVERYTHING, _HOSTS = "ringrun.everything", "ringrun.hosts"
"""Keys in click's context: present if the help lists all options; for the number of hosts that options of
another launcher request."""


class _RankCommand(click.Command):
    """A command whose options end where the ranks' command starts, which may be ``-m``."""

    def parse_args(self, ctx: click.Context, args: List[str]) -> List[str]:
        values = self.option_values(ctx)
        translated = _translated(args, values)
        args = translated.words
        if not ctx.resilient_parsing:
            ctx.meta[_HOSTS] = translated.hosts
            for line in translated.notes:
                note(line)
        position = _end_of_options(args, values)
        own = (option for option in self.params if isinstance(option, Flag) and option.is_switch)
        switches = {name for option in own for name in option.opts}
        # click would take the command as the value of a switch.
        words = [f"{word}=." if word in switches else word for word in args[:position]]
        for word in _options_in(words, values):
            flags.refuse_unknown(ctx, word, values)
        end = ["--"] if args[position : position + 1] == ["-m"] else []
        return super().parse_args(ctx, [*words, *end, *args[position:]])

    def option_values(self, ctx: click.Context) -> Dict[str, int]:
        """Return the number of values of each option, by all its names."""
        return {
            name: 0 if any(getattr(option, kind, False) for kind in ("is_flag", "count", "is_switch"))
            else option.nargs
            for option in self.get_params(ctx)
            if isinstance(option, click.Option)
            for name in (*option.opts, *option.secondary_opts)
        }

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if _EVERYTHING in ctx.meta:
            super().format_help(ctx, formatter)
        else:
            formatter.write(_USAGE + flags.brief_help(self, ctx, BRIEF))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands.format_commands(ctx, formatter)
        flags.write_options(self, ctx, formatter)
        for text in _NOTES:
            formatter.write_paragraph()
            formatter.write_text(text)


def _translated(args: Sequence[str], values: Mapping[str, int]) -> launchers.Translated:
    """Return a command line in ringrun's options, without another launcher."""
    found = launchers.translate(args, values.get)
    end = _end_of_options(found.words, values)
    try:
        inner = launchers.without_launcher(found.words[end:])
    except ConfigError as problem:
        raise click.UsageError(str(problem)) from None
    if inner is None:
        return found
    again = launchers.translate([*found.words[:end], *inner.words], values.get)
    notes = [*found.notes, *inner.notes, *again.notes]
    return launchers.Translated(again.words, notes, again.hosts or found.hosts)


def _options_in(words: Sequence[str], values: Mapping[str, int]) -> Iterator[str]:
    """Yield the options at the start of a command line, without their values."""
    position = 0
    while position < len(words) and words[position].startswith("-") and words[position] not in _NO_OPTION:
        yield words[position]
        position += 1 + values.get(words[position], 0)


def _end_of_options(words: Sequence[str], values: Mapping[str, int]) -> int:
    """Return the position of the first word that is neither an option nor its value."""
    return sum(1 + values.get(word, 0) for word in _options_in(words, values))


def _subcommand_first(words: Sequence[str]) -> Sequence[str]:
    """Move the options before a subcommand behind its name."""
    # With its settings: click keeps the help option that it makes for the first context.
    values = ringrun.option_values(click.Context(ringrun, **ringrun.context_settings))
    found = launchers.translate(words, values.get).words
    position = _end_of_options(found, values)
    if found[position : position + 1] and found[position] in commands.commands:
        return [found[position], *found[:position], *found[position + 1 :]]
    return words


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> List[CompletionItem]:
    """Return the subcommands, and files, for shell completion."""
    if ctx.args:
        return [CompletionItem(incomplete, type="file")]
    found = [CompletionItem(name) for name in commands.list_commands(ctx) if name.startswith(incomplete)]
    return [*found, CompletionItem(incomplete, type="file")]


def _show(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """Show the version, or all options, and exit."""
    if value and not ctx.resilient_parsing:
        ctx.meta[_EVERYTHING] = True
        version = f"ringrun {__version__}, Python {sys.version.split()[0]}"
        click.echo(version if param.name == "version" else ctx.get_help())
        ctx.exit()


_EXIT: Dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False, "callback": _show}


@click.command(
    cls=_RankCommand,
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]},
    epilog="Example: ringrun -np 3 -H localhost,jetson1,jetson2 train.py --epochs 3",
)
@flags.with_job_options
@flags.with_project_option
@click.option("--dry-run", cls=Flag, purpose=INSTEAD, brief="Show the plan.", is_flag=True,
              help="Show hosts, command lines and settings; start nothing.")  # fmt: skip
@click.option("-cb", "--check-build", cls=Flag, purpose=INSTEAD, brief="Find frameworks.", is_flag=True,
              help="Show usable frameworks here, or on the hosts of -H or --hostfile.")  # fmt: skip
@click.option("-v", "--version", cls=Flag, purpose=INSTEAD, brief="Show the version.", **_EXIT,
              help="Show the version.")  # fmt: skip
@click.option("--help-all", cls=Flag, purpose=INSTEAD, brief="Show all options.", **_EXIT,
              help="Show all options.")  # fmt: skip
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="COMMAND [ARGS]…",
                shell_complete=_complete)  # fmt: skip
@click.pass_context
def ringrun(
    ctx: click.Context, /, command: Tuple[str, ...], project_file: bool, dry_run: bool, check_build: bool,
    **given: Any,
) -> None:  # fmt: skip
    """Run COMMAND as one job of several ranks, on this machine and on other hosts.

    COMMAND is a script (train.py), "-m pkg.module", "python …", or a program.
    """
    try:
        options = flags.options_of(with_project(ctx, ctx.command, given, note) if project_file else given)
        if check_build:
            _check_build(options, dry_run)
        else:
            _run(options, command, dry_run)
    except RingcommError as problem:
        click.echo(visible(f"ringrun: {problem}"), err=True)
        raise SystemExit(2 if isinstance(problem, Misuse) else 1) from None


def _check_build(options: Options, dry_run: bool) -> None:
    from .agent import checks

    if options.hosts is None and options.hostfile is None:
        click.echo(checks.describe_build(), nl=False)
    else:
        _run(replace(options, np=None, slots_per_host=1), ("-m", checks.__name__), dry_run)


def _run(options: Options, command: Tuple[str, ...], dry_run: bool) -> None:
    if "join" in (options.hosts or ""):
        from .join.invitation import gathered

        with gathered(options, command, note, dry_run) as joined:
            _run_job(options, command, dry_run, joined)
    else:
        _run_job(options, command, dry_run, ())


def _run_job(
    options: Options, command: Tuple[str, ...], dry_run: bool, joined: Sequence[Tuple[HostSpec, Reach]]
) -> None:
    from .job.launch import describe, prepare

    job = prepare(options, command, joined=joined, say=note)
    _compare_hosts(click.get_current_context().meta.get(_HOSTS), job)
    own = {
        name for option in ringrun.params if not getattr(option, "hidden", False)
        for name in (*option.opts, *option.secondary_opts) if name.startswith("--") or name in ("-np", "-H")
    }  # fmt: skip
    for option in misplaced_options(job.command, own):
        text = f"{option} is after {job.command.shown}, so that gets it; options of ringrun come before it"
        click.echo(f"ringrun: {text}", err=True)
    if dry_run:
        click.echo(visible(describe(job)), nl=False)
        return
    from .job.supervise import Attempts
    from .show.output import DescriptorConsole

    console = DescriptorConsole()
    attempts = Attempts(job, options.restarts, console)
    _take_signals(attempts)
    _leave(attempts.run(), console)


def _compare_hosts(requested: Optional[Tuple[str, int]], job: Job) -> None:
    """Refuse to run on fewer hosts than options of another launcher request."""
    if requested is None or len(job.hosts) >= requested[1]:
        return
    option, count = requested
    there = ", ".join(host.name for host in job.hosts)
    raise ConfigError(
        f"{option} {count} requests {count} hosts, but this job has {len(job.hosts)} ({there}). ringrun runs "
        "on one of them and starts the ranks of all by ssh: name them, as in -H localhost,host2 (with slots, "
        f"host2:4), or leave {option} out."
    )


def misplaced_options(command: Command, own: Set[str]) -> List[str]:
    """Return ringrun's options (`own`) among the arguments of a script that does not name them itself."""
    try:
        text = Path(command.script or "").read_text("utf-8", "replace").replace("-", "_")
    except OSError:
        return []  # it is on another host, or there is no script
    words = [str(word) for word in command.argv[command.argv.index(command.script) + 1 :]]
    options = [word.partition("=")[0] for word in itertools.takewhile(lambda word: word != "--", words)]
    # A parser needs the name itself: "watch" of --watch, and "-np" with its hyphen.
    wanted = {option: option[2:] if option.startswith("--") else option for option in options}
    return [option for option in wanted if option in own and wanted[option].replace("-", "_") not in text]


def _take_signals(attempts: Attempts) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # nohup keeps its meaning.
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda signum, _: attempts.interrupt(signum))
    signal.signal(signal.SIGUSR1, lambda *_: attempts.diagnose())


def _leave(outcome: Outcome, console: Any) -> NoReturn:
    if outcome.report:
        console.write(2, outcome.report.encode("utf-8", "replace"))
    # After Ctrl-C the time to write the remaining output is limited; otherwise a pager may read slowly.
    console.close(FLUSH_S if outcome.reason in ("interrupt", "pipe") else None)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  its buffer is empty, and its pipe may be closed
    if console.problem and outcome.reason in ("done", "pipe"):
        ended = " The job was ended." if outcome.reason == "pipe" else ""
        with contextlib.suppress(OSError):  # stderr itself may not be writable
            click.echo(f"ringrun: {console.problem}{ended} Write it to a disk that has free space.", err=True)
        raise SystemExit(os.EX_IOERR)
    raise SystemExit(outcome.exit_code)


def main(args: Optional[List[str]] = None) -> None:
    """Run the command line (None: ``sys.argv[1:]``), and exit."""
    words = list(_subcommand_first(sys.argv[1:] if args is None else args))
    if words and words[0] in commands.commands:
        commands.main(args=words, prog_name="ringrun", obj=ringrun)
    ringrun.main(args=words, prog_name="ringrun")
