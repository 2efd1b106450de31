"""The command line. The modules that run a job are imported only when a job is run.

:mod:`ringrun.flags` generates the flags of the settings and horovodrun's flags.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, List, NoReturn, Optional, Tuple

import click
from click.shell_completion import CompletionItem

from .commands import commands
from .flags import refuse_unknown, split_setting_values, with_generated, write_options
from .plan import mpirun
from .plan.command import Command, misplaced_options
from .show.visible import visible

if TYPE_CHECKING:
    from .job.launch import Options
    from .job.outcome import Outcome
    from .job.restarts import Attempts

FLUSH_S = 5.0


class _RankCommand(click.Command):
    """A command whose options end where the ranks' command starts; that may start with ``-m``."""

    def parse_args(self, ctx: click.Context, args: List[str]) -> List[str]:
        values = {
            name: 0 if getattr(option, "is_flag", False) or getattr(option, "count", False) else option.nargs
            for option in self.get_params(ctx)
            if isinstance(option, click.Option)
            for name in (*option.opts, *option.secondary_opts)
        }
        translated = mpirun.translate(args, values.get)
        args = translated.words
        if not ctx.resilient_parsing:
            for note in translated.notes:
                click.echo(f"ringrun: {note}.", err=True)
        position = 0
        while position < len(args) and args[position].startswith("-") and args[position] not in ("--", "-"):
            if args[position] == "-m":
                args = [*args[:position], "--", *args[position:]]
                break
            refuse_unknown(ctx, args[position], values)
            position += 1 + values.get(args[position], 0)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands.format_commands(ctx, formatter)
        write_options(self, ctx, formatter)


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> List[CompletionItem]:
    """For shell completion: the commands beside running a job, and files."""
    if ctx.args:
        return [CompletionItem(incomplete, type="file")]
    found = [CompletionItem(name) for name in commands.list_commands(ctx) if name.startswith(incomplete)]
    return [*found, CompletionItem(incomplete, type="file")]


class _Whole(click.IntRange):
    """A whole number; click's own type reports "not a valid integer range" for other text."""

    name = "whole number"


def _show_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from .job.launch import own_version

        click.echo(f"ringrun {own_version()}, Python {sys.version.split()[0]}")
        ctx.exit()


@click.command(
    cls=_RankCommand,
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]},
    epilog="Examples: ringrun -np 2 train.py; ringrun -np 3 -H localhost,jetson1,jetson2 train.py; "
    "ringrun --hostfile hosts -m pkg.train --epochs 3",
)  # fmt: skip
@click.option("-np", "--num-proc", "np", type=_Whole(min=1), metavar="N",
              help="Number of ranks. Default: one per slot.")  # fmt: skip
@click.option("-H", "--hosts", metavar="HOST[:SLOTS],…", help="The hosts, with their slots (default 1).")
@click.option("--hostfile", "-hostfile", metavar="FILE",
              help="Hosts from a file: 'HOST slots=2' per line; also python=, cwd=, iface=.")  # fmt: skip
@click.option("-x", "forward", multiple=True, metavar="NAME[=VALUE]",
              help="Pass an environment variable to all ranks; 'PREFIX_*' passes several.")  # fmt: skip
@click.option("--python", "pythons", multiple=True, metavar="[HOST=]PATH",
              help="The ranks' Python interpreter. Default: the one that runs ringrun.")  # fmt: skip
@click.option(
    "--cwd", "cwds", multiple=True, metavar="[HOST=]PATH",
    help="The ranks' working directory. Default: the current one.",
)  # fmt: skip
@click.option("--iface", "ifaces", multiple=True, metavar="[HOST=]SPEC",
              help="Network interfaces to use: names, globs, CIDRs, '!name' to exclude.")  # fmt: skip
@click.option("--network-interfaces", "--network-interface", "nics", multiple=True, hidden=True)
@click.option("--output-dir", "--output-filename", metavar="DIR",
              help="Also write the output of rank N to DIR/rank.N/stdout and stderr.")  # fmt: skip
@click.option("--restarts", type=_Whole(min=0), default=0, metavar="N",
              help="Restart the whole job up to N times when it fails.")  # fmt: skip
@click.option("--min-np", "--min-num-proc", "min_np", type=_Whole(min=1), metavar="N",
              help="Elastic: continue after losses while N ranks are left. Default: -np.")  # fmt: skip
@click.option("--max-np", "--max-num-proc", "max_np", type=_Whole(min=1), metavar="N",
              help="Elastic: at most N ranks. Default: one per slot.")  # fmt: skip
@click.option("--host-discovery-script", "script", metavar="COMMAND",
              help="Elastic: a command that prints the available hosts, HOST[:SLOTS] per line.")  # fmt: skip
@click.option("--slots-per-host", "--slots", "slots", type=_Whole(min=1), metavar="N",
              help="Elastic: slots of hosts without a number. Default: 1.")  # fmt: skip
@click.option("--reset-limit", type=_Whole(min=0), metavar="N",
              help="Elastic: end the job when its ranks change more than N times.")  # fmt: skip
@click.option("--elastic-timeout", type=click.FloatRange(min=0, min_open=True), metavar="S",
              help="Elastic: how long to wait for enough slots or ranks. Default: 600.")  # fmt: skip
@click.option("--blacklist-cooldown-range", "cooldown", type=int, nargs=2, metavar="MIN MAX",
              help="Elastic: how long what failed is excluded, in seconds.")  # fmt: skip
@click.option("--drop", metavar="slot|host",
              help="Elastic: what a failure excludes. Default: slot, with --horovod host.")  # fmt: skip
@click.option("--via", metavar="TEMPLATE",
              help="Reach hosts by a command, like 'docker exec -i {host}'.")  # fmt: skip
@click.option("--ssh", default="ssh", metavar="COMMAND", help="The ssh command, with options if needed.")
@click.option("-p", "--ssh-port", type=_Whole(1, 65535), metavar="PORT", help="The ssh port on all hosts.")
@click.option("-i", "--ssh-identity-file", metavar="FILE", help="The private key for ssh.")
@click.option("--horovod", is_flag=True,
              help="'import horovod.torch' imports ringcomm on all ranks; HOROVOD_* apply.")  # fmt: skip
@click.option("--ship-self/--no-ship-self", default=True,
              help="Send this machine's ringcomm to the other hosts, unless they have it [yes].")  # fmt: skip
@click.option("--provision", is_flag=True,
              help="Send the wheels of numpy and psutil to hosts that lack them.")  # fmt: skip
@click.option("--ship", is_flag=True,
              help="Send the current directory to the other hosts, where ranks run in a copy.")  # fmt: skip
@click.option("--ship-from", metavar="DIR", help="Like --ship, with a directory above the current one.")
@click.option("--fetch", multiple=True, metavar="PATTERN",
              help="Bring files of these copies back at the end, to fetched/HOST; like 'out/*'.")  # fmt: skip
@click.option("--bind", type=click.Choice(["none", "core", "socket"]), default="none",
              help="Bind each rank to cores of its own, or to a socket [none].")  # fmt: skip
@click.option("--watch", is_flag=True,
              help="Show a table of all ranks while they run: steps, rates, waiting.")  # fmt: skip
@click.option("--report", metavar="FILE.html",
              help="Write a page about the run at the end: curves, waiting, links, operations.")  # fmt: skip
@click.option("--metrics-port", type=_Whole(0, 65535), metavar="PORT",
              help="Serve numbers of all ranks for Prometheus on 127.0.0.1:PORT; 0: a free one.")  # fmt: skip
@click.option("--oversubscribe", is_flag=True, help="Allow more ranks than slots.")
@click.option("--slots-each", type=_Whole(min=1), hidden=True)
@click.option("--config-file", metavar="FILE", help="Settings, as lines like 'timeout: 300'.")
@click.option("--tee", metavar="FILE", help="Also write all that is shown to a file.")
@click.option("--debug", type=_Whole(min=0), metavar="RANK",
              help="Give the terminal to a rank, for pdb; time limits are off.")  # fmt: skip
@click.option("-q", "--quiet", is_flag=True, help="Show the output of ranks, warnings and failures only.")
@click.option("--verbose", is_flag=True, help="Log the job's progress, and show the table of links.")
@click.option("--dry-run", is_flag=True, help="Show the plan and the command lines; start nothing.")
@click.option("--print-config", is_flag=True, help="Show every setting and its source; start nothing.")
@click.option("-cb", "--check-build", is_flag=True,
              help="Show which frameworks can be used here, or on the given hosts, and exit.")  # fmt: skip
@click.option("-v", "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version,
              help="Show the version and exit.")  # fmt: skip
@with_generated
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="COMMAND [ARGS]…",
                shell_complete=_complete)  # fmt: skip
def ringrun(
    command: Tuple[str, ...], dry_run: bool, print_config: bool, check_build: bool, **given: Any
) -> None:
    """Run COMMAND as one job of several ranks, on this machine and on other hosts through ssh.

    In a job of Slurm, LSF, Grid Engine, OAR or PBS the hosts are those of that job.

    COMMAND is a script (train.py), "-m pkg.module", "python …", or any other program. One that is named
    like a command below is started by its path: ./stop.
    """
    from ringcomm.errors import RingcommError

    try:
        options = _options(given)
        if print_config:
            _print_config(options)
        elif check_build:
            _check_build(options, dry_run)
        else:
            _run(options, command, dry_run)
    except RingcommError as problem:
        from ringcomm.errors import Misuse

        click.echo(visible(f"ringrun: {problem}"), err=True)
        raise SystemExit(2 if isinstance(problem, Misuse) else 1) from None


def _options(given: Any) -> Options:
    from .elastic.options import ElasticOptions
    from .job.launch import Options
    from .reach.ssh import SshOptions

    setting_values, given = split_setting_values(given)
    ifaces = (*given["ifaces"], *([",".join(given["nics"])] if given["nics"] else []))
    return Options(
        np=given["np"], hosts=given["hosts"], hostfile=given["hostfile"], forward=given["forward"],
        pythons=given["pythons"], cwds=given["cwds"], ifaces=ifaces, output_dir=given["output_dir"],
        restarts=given["restarts"], bind=given["bind"], slots_each=given["slots_each"],
        oversubscribe=given["oversubscribe"],
        setting_values=setting_values, config_file=given["config_file"],
        horovod=given["horovod"], verbose=given["verbose"],
        ship_self=given["ship_self"], provision=given["provision"], fetch=given["fetch"],
        ship=given["ship_from"] or ("." if given["ship"] else None),
        watch=given["watch"], report=given["report"], metrics_port=given["metrics_port"],
        quiet=given["quiet"], tee=given["tee"], debug=given["debug"],
        ssh=SshOptions(given["ssh"], given["ssh_port"], given["ssh_identity_file"]), via=given["via"],
        elastic=ElasticOptions(
            given["min_np"], given["max_np"], given["script"], given["slots"], given["reset_limit"],
            given["elastic_timeout"], given["cooldown"] or None, given["drop"],
        ),
    )  # fmt: skip


def _print_config(options: Options) -> None:
    from .job.launch import effective_settings
    from .plan.setting_sources import describe

    click.echo(visible(describe(effective_settings(options, os.environ))), nl=False)


def _check_build(options: Options, dry_run: bool) -> None:
    from .show import build

    if options.hosts is None and options.hostfile is None:
        click.echo(build.describe_build(), nl=False)
    else:
        _run(replace(options, np=None, slots_each=1), ("-m", build.__name__), dry_run)


def _run(options: Options, command: Tuple[str, ...], dry_run: bool) -> None:
    from .job.launch import describe, prepare

    job = prepare(options, command)
    for option in () if options.quiet else _misplaced(job.command):
        text = f"{option} is after {job.command.shown}, so that gets it; options of ringrun come before it"
        click.echo(f"ringrun: {text}", err=True)
    if dry_run:
        click.echo(visible(describe(job)), nl=False)
        return
    from .job.restarts import Attempts
    from .show.console import DescriptorConsole, open_tee

    console = DescriptorConsole(open_tee(options.tee))
    attempts = Attempts(job, options.restarts, console)
    _take_signals(attempts)
    outcome = attempts.run()
    if outcome.reason == "interrupt":
        from .job.requeue import requeue

        def say(text: str) -> None:
            attempts.show(f"ringrun: {text}\n")

        requeue(os.environ, options.restarts, attempts.signum, say)
    _leave(outcome, console)


def _misplaced(command: Command) -> List[str]:
    """Options of ringrun's that the script gets, although it seems to have none of that name."""
    own = {
        name for option in ringrun.params if not getattr(option, "hidden", False)
        for name in (*option.opts, *option.secondary_opts) if name.startswith("--")
    }  # fmt: skip
    try:
        text = Path(command.script or "").read_text("utf-8", "replace")
    except OSError:
        return []  # it is on another host, or there is no script
    return misplaced_options(command, text, own)


def _take_signals(attempts: Attempts) -> None:
    def pass_on(signum: int, _: object) -> None:
        attempts.interrupt(signum)

    signal.signal(signal.SIGINT, pass_on)
    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGUSR1, lambda *_: attempts.diagnose())
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup keeps its meaning
        signal.signal(signal.SIGHUP, pass_on)


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
    """Run the command line, and exit.

    Args:
        args: the arguments; None for ``sys.argv[1:]``.
    """
    words = sys.argv[1:] if args is None else args
    if words and words[0] in commands.commands:
        commands.main(args=words, prog_name="ringrun", obj=ringrun)
    ringrun.main(args=args, prog_name="ringrun")


if __name__ == "__main__":
    main()
