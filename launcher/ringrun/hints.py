"""Hints about command lines: misspelt options and programs, and options in the wrong place."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Container, Iterable, List, Optional, Sequence, Tuple

from ringcomm.configuration.hints import nearest

from .plan import launchers
from .plan.command import Command

if TYPE_CHECKING:
    from .plan.job import Job

_MEANT = {
    **dict.fromkeys(("jobs", "list", "status"), "ps"),
    **dict.fromkeys(("launch", "run", "start"), "train.py"),
    **dict.fromkeys(("log", "logs"), "--output-dir FOLDER train.py"),
    "cancel": "stop JOB", "help": "--help", "version": "--version",
}  # fmt: skip
"""ringrun's words for subcommands of other launchers."""


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return a sentence with the nearest of the known names, or else another one."""
    near = nearest(name, known)
    return f"Did you mean {near}?" if near else otherwise


def nearest_option(name: str, known: Iterable[str]) -> str:
    """Return the option most like a name, among those with an effect; or ""."""
    options = sorted({*launchers.names(), *known}, key=lambda option: option.startswith("--"))
    bare = {option.lstrip("-"): option for option in options}
    return bare.get(nearest(name.lstrip("-"), sorted(bare)), "")


def missing_program(job: Job, subcommands: Sequence[str]) -> Optional[Tuple[str, str]]:
    """Return the program that does not exist, and the intended command line, which resembles a subcommand or
    names a file here; None if the program may exist.
    """
    first, *rest = job.command.argv
    after = rest[1] or "" if first is None and rest[0] == "-m" else ""
    if after.endswith(".py") and Path(after).is_file():
        return f"module {after!r} (-m takes the name of a module)", f"ringrun {after}"
    word = first or rest[0] or ""
    if first is None or "/" in word or job.command.is_python or shutil.which(word):
        return None
    files = [name for name in (f"{word}.py", word) if Path(name).is_file()]
    if files:
        return f"program {word!r} in PATH", "ringrun " + (files[0] if files[0] != word else f"./{word}")
    if not all(host.is_local for host in job.hosts):
        return None
    near = _MEANT.get(word, "") or nearest(word, subcommands, 0.7)
    return (f"program {word!r} in PATH", f"ringrun {near}") if near else None


def misplaced_options(command: Command, own: Container[str]) -> List[str]:
    """Return ringrun's options (`own`) among the arguments of a script that does not name them itself."""
    try:
        text = Path(command.script or "").read_text("utf-8", "replace").replace("-", "_")
    except OSError:
        return []  # it is on another host, or there is no script
    words = [str(word) for word in command.argv[command.argv.index(command.script) + 1 :]]
    if "--" in words:
        words = words[: words.index("--")]
    options = [word.partition("=")[0] for word in words]
    # A parser needs the name itself: "watch" of --watch, and "-np" with its hyphen.
    wanted = {option: option[2:] if option.startswith("--") else option for option in options}
    return [option for option in wanted if option in own and wanted[option].replace("-", "_") not in text]
