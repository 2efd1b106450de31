"""The command that every rank runs, parsed to find its interpreter and its script. Pure."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple, Optional, Sequence, Tuple

from ringcomm.errors import ConfigError

_PYTHON = re.compile(r"python(3(\.\d+)?)?\Z")
_SPLIT = (
    (
        re.compile(r"([^/=,]+@[^/=,]+|[\w.-]+:\d+|\[[0-9a-fA-F:]+\](:\d+)?|,[^/=]*|[^/=]*,)\Z"),
        "a host. Hosts are separated by commas, without blanks, like: ringrun -H localhost,host1:2 train.py",
    ),
    (
        re.compile(r"[A-Za-z_]\w*="),
        "a variable. Each one follows a -x of its own, like: ringrun -x NAME=VALUE -x OTHER train.py",
    ),
)
"""Parts of lists that a blank has separated from their option, so that they became the command."""
_TAKES_VALUE = ("-X", "-W", "--check-hash-based-pycs")


class Command(NamedTuple):
    """A command line for the ranks."""

    argv: Tuple[Optional[str], ...]  # None stands for the interpreter chosen for the host
    word: Optional[str] = None  # python or python3 if the user named it without a path
    is_python: bool = False  # ringcomm must then be importable
    script: Optional[str] = None  # None for a module, -c, or another program

    @property
    def shown(self) -> str:
        """The script, the module or the program, without arguments."""
        if self.script is not None:
            return self.script
        words = [word for word in self.argv if word is not None]
        # After -c, and of programs other than Python, it is an argument.
        is_module = self.is_python and "-m" in words[:-1] and "-c" not in words[: words.index("-m")]
        return words[words.index("-m") + 1] if is_module else words[0]

    def text(self, python: str) -> str:
        """Return the command line for messages, with `python` as the interpreter."""
        return " ".join(python if word is None else word for word in self.argv)


def parse_command(words: Sequence[str]) -> Command:
    """Parse ``train.py …``, ``-m pkg.mod …``, ``python train.py …`` or any other command."""
    if not words or not words[0]:
        raise ConfigError("There is no command to run. Give it last, like: ringrun -np 2 train.py --epochs 3")
    first = words[0]
    for pattern, meant in _SPLIT:
        if pattern.match(first):
            raise ConfigError(f"{first!r} is no command; it looks like {meant}")
    if first == "-m":
        if len(words) < 2 or words[1].startswith("-"):
            raise ConfigError("-m is not followed by a module. Write it like: ringrun -np 2 -m pkg.mod")
        return Command((None, *words), is_python=True)
    if first.endswith(".py"):
        return Command((None, *words), is_python=True, script=first)
    if _PYTHON.match(first.rsplit("/", 1)[-1]):
        word = first if "/" not in first else None
        return Command(tuple(words), word=word, is_python=True, script=_script(words[1:]))
    return Command(tuple(words))


def in_tree(command: Command, root: Path, cwd: Path) -> Command:
    """Return the command with a script's absolute path in the tree `root` made relative to `cwd`."""
    script, root, cwd = command.script, root.resolve(), cwd.resolve()
    if script is None:
        return command
    real = Path(os.path.abspath(cwd / script))  # noqa: PTH100  links stay
    if not Path(script).is_absolute():
        if root not in real.parents:
            above = os.path.relpath(os.path.commonpath([real.parent, root]), cwd)
            raise ConfigError(
                f"--ship sends {root}, and {script} is not in it, so the hosts would not have it. Send a "
                f"directory that contains both, with --ship={above}, or change to the script's directory."
            )
        return command
    real = Path(script).parent.resolve() / Path(script).name
    if root not in real.parents:
        return command
    relative = os.path.relpath(real, cwd)
    place = command.argv.index(script)
    argv = (*command.argv[:place], relative, *command.argv[place + 1 :])
    return command._replace(argv=argv, script=relative)


def with_interpreter(command: Command, python: Optional[str]) -> Command:
    """Return the command with ``python`` replaced by a path; None: the interpreter chosen for the host."""
    if command.word is None:
        return command
    return command._replace(argv=(python, *command.argv[1:]))


def _script(words: Sequence[str]) -> Optional[str]:
    """Return the script among the arguments of a Python interpreter, or None."""
    rest = iter(words)
    for word in rest:
        if word in _TAKES_VALUE:
            next(rest, None)
        elif word.startswith(("-m", "-c")) or word == "-":
            return None
        elif not word.startswith("-"):
            return word
    return None
