"""The commands beside running a job: ``ringrun ps``, ``stop``, ``doctor``, ``diagnose``, ``add``, ``drop``.

Each takes the words after its name, prints, and exits. The modules behind them are imported only then.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Callable, Dict, List, NoReturn

import click

Run = Callable[[List[str]], NoReturn]
_HELP = (["-h"], ["--help"])


def _usage(text: str, words: List[str]) -> NoReturn:
    """Show how a command is used: as output if that was asked for, otherwise as an error."""
    is_help = words[:1] in _HELP
    click.echo(text, err=not is_help, nl=not text.endswith("\n"))
    raise SystemExit(0 if is_help else 2)


def _answer(ask: Callable[[], str]) -> NoReturn:
    """Print the answer of a job, or why there is none."""
    from ringcomm.errors import ConfigError

    try:
        click.echo(ask())
    except ConfigError as problem:
        click.echo(f"ringrun: {problem}", err=True)
        raise SystemExit(1) from None
    raise SystemExit(0)


def diagnose(words: List[str]) -> NoReturn:
    """``ringrun diagnose DIRECTORY``."""
    from ringcomm.errors import ConfigError

    from .diagnosis.diagnose import USAGE, diagnose_folder
    from .show.visible import visible

    if len(words) != 1 or words in _HELP:
        _usage(USAGE, words)
    try:
        text, code = diagnose_folder(Path(words[0]))
    except ConfigError as problem:
        click.echo(f"ringrun: {problem}", err=True)
        raise SystemExit(2) from None
    click.echo(visible(text), nl=False)
    raise SystemExit(code)


def doctor(words: List[str]) -> NoReturn:
    """``ringrun doctor -H ...``."""
    from .doctor.command import run_doctor

    run_doctor(words)


def add(words: List[str]) -> NoReturn:
    """``ringrun add HOST[:SLOTS]``."""
    _change_hosts("add", "[:SLOTS]", words)


def drop(words: List[str]) -> NoReturn:
    """``ringrun drop HOST``."""
    _change_hosts("drop", "", words)


def _change_hosts(what: str, slots: str, words: List[str]) -> NoReturn:
    from .job.job_commands import change_hosts

    if len(words) not in (1, 3) or words in _HELP:
        _usage(f"Usage: ringrun {what} HOST{slots} [--job ID]", words)
    _answer(lambda: change_hosts(what, words, os.environ))


def ps(words: List[str]) -> NoReturn:
    """``ringrun ps``."""
    from .job.job_commands import show_jobs

    if words:
        _usage("Usage: ringrun ps\n\nShow your running jobs on this machine.", words)
    click.echo(show_jobs(os.environ), nl=False)
    raise SystemExit(0)


def stop(words: List[str]) -> NoReturn:
    """``ringrun stop [JOB]``."""
    from .job.job_commands import stop_job

    if len(words) > 1 or words in _HELP:
        _usage("Usage: ringrun stop [JOB]\n\nEnd a running job of yours; `ringrun ps` lists them.", words)
    _answer(lambda: stop_job(words, os.environ))


def completion(words: List[str], command: click.Command) -> NoReturn:
    """``ringrun completion SHELL``: the script that makes a shell complete options and file names.

    Args:
        words: the shell.
        command: the command whose options are completed.
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(words[0]) if len(words) == 1 else None
    if found is None:
        _usage(
            "Usage: ringrun completion bash|zsh|fish\n\nFor bash, add this line to ~/.bashrc:\n"
            '  eval "$(ringrun completion bash)"',
            words,
        )
    click.echo(found(command, {}, "ringrun", "_RINGRUN_COMPLETE").source())
    raise SystemExit(0)


COMMANDS: Dict[str, Run] = {
    "diagnose": diagnose, "doctor": doctor, "add": add, "drop": drop, "ps": ps, "stop": stop,
}  # fmt: skip
"""By the first word of the command line."""
