"""The command line. Everything heavy is imported only when a job is really run."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, List, NoReturn, Optional, Tuple

import click

if TYPE_CHECKING:
    from .launch import Options
    from .outcome import Outcome
    from .supervise import Supervisor

FLUSH_S = 5.0


class _RankCommand(click.Command):
    """Options end where the ranks' command starts, and that may start with ``-m``."""

    def parse_args(self, ctx: click.Context, args: List[str]) -> List[str]:
        takes_value = {
            name: not getattr(option, "is_flag", False) and not getattr(option, "count", False)
            for option in self.get_params(ctx)
            if isinstance(option, click.Option)
            for name in (*option.opts, *option.secondary_opts)
        }
        position = 0
        while position < len(args) and args[position].startswith("-") and args[position] not in ("--", "-"):
            if args[position] == "-m":
                args = [*args[:position], "--", *args[position:]]
                break
            position += 2 if takes_value.get(args[position], False) else 1
        return super().parse_args(ctx, args)


def _show_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from .launch import own_version

        click.echo(f"ringrun {own_version()}, Python {sys.version.split()[0]}")
        ctx.exit()


_SECONDS = click.FloatRange(min=0, min_open=True)


@click.command(
    cls=_RankCommand,
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]},
    epilog="Examples: ringrun -np 2 train.py; ringrun -np 3 -H localhost,jetson1,jetson2 train.py; "
    "ringrun --hostfile hosts -m pkg.train --epochs 3",
)  # fmt: skip
@click.option("-np", "--num-proc", "np", type=click.IntRange(min=1), metavar="N",
              help="How many ranks. Default: one for every slot.")  # fmt: skip
@click.option("-H", "--hosts", metavar="HOST[:SLOTS],…", help="Where, with how many ranks on each (1).")
@click.option("--hostfile", "-hostfile", metavar="FILE",
              help="From a file: 'HOST slots=2' per line; also python=, cwd=, iface=.")  # fmt: skip
@click.option("-x", "forward", multiple=True, metavar="NAME[=VALUE]",
              help="Pass a variable on to the ranks; 'PREFIX_*' passes several.")  # fmt: skip
@click.option("--python", "pythons", multiple=True, metavar="[HOST=]PATH",
              help="The interpreter. Default: the path of the one that runs ringrun.")  # fmt: skip
@click.option(
    "--cwd", "cwds", multiple=True, metavar="[HOST=]PATH", help="The working directory. Default: this one."
)
@click.option("--iface", "ifaces", multiple=True, metavar="[HOST=]SPEC",
              help="Network interfaces to use: names, globs, CIDRs, '!name' to exclude.")  # fmt: skip
@click.option(
    "--output-dir", metavar="DIR", help="Also keep what rank N prints in DIR/rank.N/stdout and stderr."
)
@click.option(
    "--start-timeout", type=_SECONDS, metavar="S", help="Seconds for all ranks to find each other. [60]"
)
@click.option(
    "--timeout", type=_SECONDS, metavar="S", help="Seconds without a byte before a peer is given up. [600]"
)
@click.option("--ssh", default="ssh", metavar="COMMAND", help="The ssh command, perhaps with options.")
@click.option(
    "-p", "--ssh-port", type=click.IntRange(1, 65535), metavar="PORT", help="The ssh port on all hosts."
)
@click.option("-i", "--ssh-identity-file", metavar="FILE", help="The private key to log in with.")
@click.option("--verbose", is_flag=True, help="Tell what happens, and show the table of links.")
@click.option("--dry-run", is_flag=True, help="Show the plan and the command lines; start nothing.")
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version,
              help="Show the version and leave.")  # fmt: skip
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="COMMAND [ARGS]…")
def ringrun(command: Tuple[str, ...], dry_run: bool, **given: Any) -> None:
    """Run COMMAND as one job of several ranks, on this machine and on others reached by ssh.

    COMMAND is a script (train.py), "-m pkg.module", "python …", or any other program.
    """
    from ringcomm.errors import RingcommError

    try:
        options = _options(given)
        _run(options, command, dry_run)
    except RingcommError as problem:
        from ringcomm.errors import Misuse

        click.echo(f"ringrun: {problem}", err=True)
        raise SystemExit(2 if isinstance(problem, Misuse) else 1) from None


def _options(given: Any) -> Options:
    from .launch import Options
    from .ssh import SshOptions

    return Options(
        np=given["np"], hosts=given["hosts"], hostfile=given["hostfile"], forward=given["forward"],
        pythons=given["pythons"], cwds=given["cwds"], ifaces=given["ifaces"], output_dir=given["output_dir"],
        start_timeout_s=given["start_timeout"], timeout_s=given["timeout"], verbose=given["verbose"],
        ssh=SshOptions(given["ssh"], given["ssh_port"], given["ssh_identity_file"]),
    )  # fmt: skip


def _run(options: Options, command: Tuple[str, ...], dry_run: bool) -> None:
    from .launch import describe, launch, prepare

    job = prepare(options, command)
    if dry_run:
        click.echo(describe(job), nl=False)
        return
    from .console import DescriptorConsole

    console = DescriptorConsole()
    outcome = launch(job, console, started=_take_signals)
    _leave(outcome, console)


def _take_signals(supervisor: Supervisor) -> None:
    def pass_on(signum: int, _: object) -> None:
        supervisor.interrupt(signum)

    signal.signal(signal.SIGINT, pass_on)
    signal.signal(signal.SIGTERM, pass_on)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup keeps its meaning
        signal.signal(signal.SIGHUP, pass_on)


def _leave(outcome: Outcome, console: Any) -> NoReturn:
    if outcome.report:
        console.write(2, outcome.report.encode("utf-8", "replace"))
    # After Ctrl-C nobody waits for a pager; otherwise it may take its time.
    console.close(FLUSH_S if outcome.reason in ("interrupt", "pipe") else None)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  nothing is in it, and the pipe may be gone
    if console.problem and outcome.reason in ("done", "pipe"):
        ended = " The job was ended." if outcome.reason == "pipe" else ""
        with contextlib.suppress(OSError):  # it may be stderr itself that cannot be written
            click.echo(f"ringrun: {console.problem}{ended} Send it to a place that has room.", err=True)
        raise SystemExit(os.EX_IOERR)
    raise SystemExit(outcome.exit_code)


def main(args: Optional[List[str]] = None) -> None:
    """The entry point."""
    ringrun.main(args=args, prog_name="ringrun")


if __name__ == "__main__":
    main()
