"""Hints about command lines: misspelt options, and options in the wrong place."""

from __future__ import annotations

from pathlib import Path
from typing import Container, Iterable, List

from ringcomm.configuration.hints import nearest

from .plan import launchers
from .plan.command import Command


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return a sentence with the nearest of the known names, or else another one."""
    near = nearest(name, known)
    return f"Did you mean {near}?" if near else otherwise


def nearest_option(name: str, known: Iterable[str]) -> str:
    """Return the option most like a name, among those with an effect; or ""."""
    options = sorted({*launchers.names(), *known}, key=lambda option: option.startswith("--"))
    bare = {option.lstrip("-"): option for option in options}
    return bare.get(nearest(name.lstrip("-"), sorted(bare)), "")


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
