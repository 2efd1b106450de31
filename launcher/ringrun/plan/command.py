"""The command that every rank runs, parsed to find its interpreter and its script. Pure."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Container, List, NamedTuple, Optional, Sequence, Tuple

from ringcomm.errors import ConfigError

_PYTHON = re.compile(r"python(3(\.\d+)?)?\Z")
_HOST = re.compile(r"[^/=,]+@[^/=,]+|[\w.-]+:\d+|\[[0-9a-fA-F:]+\](:\d+)?|,[^/=]*|[^/=]*,")
_VARIABLE = re.compile(r"[A-Za-z_]\w*=")
_TAKES_VALUE = ("-X", "-W", "--check-hash-based-pycs")


class Command(NamedTuple):
    """A command line for the ranks.

    Attributes:
        argv: the arguments; None stands for the interpreter chosen for the host.
        word: ``python`` or ``python3`` if the user named the interpreter without a path, else None.
        is_python: whether it is a Python program, so that ringcomm must be importable there.
        script: the script file it runs, or None (a module, ``-c``, another program).
    """

    argv: Tuple[Optional[str], ...]
    word: Optional[str] = None
    is_python: bool = False
    script: Optional[str] = None

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
        """The command line for messages, with ``python`` as the interpreter."""
        return " ".join(python if word is None else word for word in self.argv)


def parse_command(words: Sequence[str], variables: Sequence[str] = ()) -> Command:
    """Parse ``train.py …``, ``-m pkg.mod …``, ``python train.py …`` or any other command.

    Args:
        words: the command and its arguments.
        variables: the arguments of ``-x``, one of which may have been meant as the command.

    Raises:
        ConfigError: there is no command, or ``-m`` names no module, or the first word belongs to an option.
    """
    if not words or not words[0]:
        taken = [name for name in variables if name.endswith(".py")]
        why = f": -x has taken {taken[0]} for the name of a variable" if taken else ""
        raise ConfigError(
            f"There is no command to run{why}. Give it last, like: ringrun -np 2 train.py --epochs 3"
        )
    first = words[0]
    _check_separated(first)
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


def _check_separated(first: str) -> None:
    """Refuse a list of hosts or variables that has blanks, of which the shell makes the command."""
    if _HOST.fullmatch(first):
        raise ConfigError(
            f"{first!r} is no command; it looks like a host. Hosts are separated by commas, without blanks, "
            "like: ringrun -H localhost,user@host1,host2:4 train.py"
        )
    if _VARIABLE.match(first):
        raise ConfigError(
            f"{first!r} is no command; it looks like a variable. Each one follows a -x of its own, like: "
            f"ringrun -x {first} -x NAME train.py"
        )


def misplaced_options(command: Command, text: str, own: Container[str]) -> List[str]:
    """Options of ringrun's among the arguments of a script that seems to have no option of that name.

    Args:
        command: the command.
        text: of the script.
        own: ringrun's options.
    """
    words = [] if command.script is None else command.argv[command.argv.index(command.script) + 1 :]
    found: List[str] = []
    for word in words:
        if word is None or word == "--":
            break
        option = word.partition("=")[0]
        if option in own and option not in found and not _names(text, option):
            found.append(option)
    return found


def _names(text: str, option: str) -> bool:
    """Return whether a program's text has a name like that of an option, as its parser needs it."""
    if not option.startswith("--"):
        return re.search(rf"(?<![-\w]){re.escape(option)}\b", text) is not None
    name = re.escape(option[2:]).replace(r"\-", "[-_]")
    return re.search(rf"""--{name}\b|["']{name}["']|\b{name}\s*[:=]|\.{name}\b""", text) is not None


def in_tree(command: Command, root: Path, cwd: Path) -> Command:
    """The command with an absolute path of its script replaced by one relative to the working directory.

    So the script is found in a copy of the tree. One that is not in the tree stays as it is.

    Args:
        command: the command.
        root: the tree that is copied.
        cwd: the working directory, in the tree.

    Raises:
        ConfigError: the script has a relative path that leads out of the tree, so no host will have it.
    """
    script = command.script
    if script is None:
        return command
    if not Path(script).is_absolute():
        _check_inside(script, root, cwd)
        return command
    real = Path(script).parent.resolve() / Path(script).name
    if root.resolve() not in real.parents:
        return command
    relative = os.path.relpath(real, cwd.resolve())
    place = command.argv.index(script)
    argv = (*command.argv[:place], relative, *command.argv[place + 1 :])
    return command._replace(argv=argv, script=relative)


def _check_inside(script: str, root: Path, cwd: Path) -> None:
    real, root = Path(os.path.abspath(cwd.resolve() / script)), root.resolve()  # noqa: PTH100  links stay
    if root not in real.parents:
        above = os.path.relpath(os.path.commonpath([real.parent, root]), cwd.resolve())
        raise ConfigError(
            f"--ship sends {root}, and {script} is not in it, so the hosts would not have it. Send a "
            f"directory that contains both, with --ship={above}, or change to the script's directory."
        )


def with_interpreter(command: Command, python: Optional[str]) -> Command:
    """The command with ``python`` replaced by a path, or by the interpreter chosen for the host (None)."""
    if command.word is None:
        return command
    return command._replace(argv=(python, *command.argv[1:]))


def _script(words: Sequence[str]) -> Optional[str]:
    """The script among the arguments of a Python interpreter, if it runs one."""
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word in _TAKES_VALUE:
            skip = True
        elif word.startswith(("-m", "-c")) or word == "-":
            return None
        elif not word.startswith("-"):
            return word
    return None
