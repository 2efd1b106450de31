"""Reaching other hosts: the ssh command line, and what its failures mean. Pure.

The system's ssh runs with the user's own configuration. Host keys are checked as that says; the
only things added are that nobody can be asked (``BatchMode``) and that silence ends.
"""

from __future__ import annotations

import re
import shlex
from typing import List, NamedTuple, Optional, Sequence

from ringcomm.errors import ConfigError

from ..plan.hosts import HostSpec
from .protocol import BOOT

CONNECT_TIMEOUT_S = 10
RETRIES = 3
"""How often a login that sshd dropped (``MaxStartups``) is tried again."""


class SshOptions(NamedTuple):
    """How to log in: the command, and what horovodrun's ``-p`` and ``-i`` say."""

    command: str = "ssh"
    port: Optional[int] = None
    identity_file: Optional[str] = None


class Failure(NamedTuple):
    """Why a host did not start: one paragraph, and whether trying again may help."""

    text: str
    retry: bool = False


LOGINS_AT_ONCE = 8
"""How many logins are under way at the same time: they may all pass through one jump host."""


def retry_delay_s(attempt: int, chance: float) -> float:
    """Seconds to wait before the retry with this number (1, 2, …); ``chance`` from 0 to 1 spreads them."""
    return (0.3 + chance) * float(2 ** (attempt - 1))


def quoted_path(path: str) -> str:
    """A path for the remote shell, whichever that is (sh, csh, fish). A leading ``~/`` stays live.

    Raises:
        ConfigError: it holds a character that these shells quote in different ways.
    """
    if re.search(r"['\\!\n]", path):
        raise ConfigError(
            f"{path!r} cannot be handed to a remote shell: it holds a quote, a backslash, an exclamation "
            "mark or a line end. Make a symbolic link with a plainer name."
        )
    if path.startswith("~/"):
        return "~/" + quoted_path(path[2:])
    return path if re.fullmatch(r"[A-Za-z0-9_./+@%:,-]+", path) else f"'{path}'"


def remote_command(python: str) -> str:
    """What the login shell over there is told to run. No secret is in it; the rest goes over stdin."""
    return f"{quoted_path(python)} -c '{BOOT}'"


def ssh_argv(spec: HostSpec, python: str, options: SshOptions) -> List[str]:
    """The whole command line for one host.

    Raises:
        ConfigError: ``--ssh`` cannot be split into words, or the interpreter's path not be quoted.
    """
    try:
        words = shlex.split(options.command)
    except ValueError as problem:
        raise ConfigError(f"--ssh {options.command!r} cannot be read: {problem}.") from None
    if not words:
        raise ConfigError("--ssh is empty. Give a command, like: --ssh 'ssh -F my_config'")
    words += ["-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_TIMEOUT_S}"]
    words += ["-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"]
    if options.port is not None:
        words += ["-p", str(options.port)]
    if options.identity_file is not None:
        words += ["-i", options.identity_file]
    return [*words, spec.target, remote_command(python)]


def login_line(argv: Sequence[str]) -> str:
    """The same login as somebody would type it, to try by hand."""
    kept: List[str] = []
    skip = False
    for word, after in zip(argv[:-1], [*argv[1:-1], ""]):
        if skip:
            skip = False
        elif word == "-o" and after.split("=")[0] in (
            "BatchMode", "ConnectTimeout", "ServerAliveInterval", "ServerAliveCountMax",
        ):  # fmt: skip
            skip = True
        elif word != "-T":
            kept.append(word)
    return " ".join(shlex.quote(word) for word in kept)


def explain_start(
    host: str, argv: Sequence[str], python: str, status: Optional[int], stderr: str, is_local: bool = False
) -> Failure:
    """Why an ssh (or a local interpreter) ended before the agent said a word.

    Args:
        host: as the user named it.
        argv: the command line that was run.
        python: the interpreter it should have started.
        status: its exit status, negative for a signal, None if it could not be started.
        stderr: what it said.
    """
    stderr = stderr.replace(BOOT, "…")  # a program that is no Python may quote what it was given
    said = last_lines(stderr)
    old = re.search(r"^ringrun-old-python ([\d.]+) ?(.*)", stderr, re.M)
    if old:
        return Failure(
            f"{host}: the Python there is too old: {old.group(2).strip() or python} is {old.group(1)}, and "
            f"ringcomm needs 3.8 or newer. {other_python(host)}"
        )
    hand = "" if is_local else login_line(argv) + " "
    if status == 255 and not is_local:
        return _ssh_failure(host, hand.strip(), stderr, said)
    if status in (126, 127) or (status == 1 and re.search(r"not found|No such file", stderr, re.I)):
        return Failure(f"{host}: there is no Python at {python} on that host ({said}). {other_python(host)}")
    how = "was ended by a signal" if status is not None and status < 0 else f"ended with status {status}"
    return Failure(
        f"{host}: {python} {how} before it could start anything there. It said: {said}. "
        f"Is it a Python? Try by hand: {hand}{quoted_path(python)} --version"
    )


def other_python(host: str) -> str:
    """The remedy for a host whose interpreter is not the right one."""
    return f"Another interpreter is named with --python {host}=PATH, or with python=PATH in the hostfile."


def _ssh_failure(host: str, hand: str, stderr: str, said: str) -> Failure:
    """ssh's own failures, by what it wrote; its status is 255 for all of them."""
    if "REMOTE HOST IDENTIFICATION HAS CHANGED" in stderr:
        return Failure(
            f"{host}: its host key is not the one that was accepted earlier. Either the machine was set up "
            "anew, or somebody is in between. Find out which; only then remove the old key (ssh-keygen -R "
            f"{host}) and accept the new one by running once by hand: {hand}"
        )
    for pattern, text in _SSH_FAILURES:
        if re.search(pattern, stderr, re.I):
            return Failure(f"{host}: " + text.format(hand=hand, said=said, timeout_s=CONNECT_TIMEOUT_S))
    if re.search(_DROPPED, stderr, re.I):
        return Failure(
            f"{host}: sshd dropped the connection before the login ({said}), which it does when too many "
            "arrive at once (MaxStartups in its sshd_config), or when it bans this address. Try again in a "
            f"moment, or try by hand: {hand}",
            retry=True,
        )
    return Failure(f"{host}: the login failed: {said}. Try by hand: {hand}")


_DROPPED = (
    r"kex_exchange_identification|ssh_exchange_identification|Connection reset by|"
    r"Connection closed by (remote host|\S+ port)"
)
_SSH_FAILURES = (
    (
        r"Could not resolve hostname|Name or service not known|nodename nor servname",
        "nobody knows a host of this name ({said}). Check the spelling, use its address, or give it a "
        "name in ~/.ssh/config. By hand: {hand}",
    ),
    (
        r"Host key verification failed|No \S+ host key is known",
        "its host key has not been accepted on this machine yet. Run this once by hand, compare the "
        "fingerprint and answer yes: {hand}",
    ),
    (
        r"Permission denied|Too many authentication failures",
        "the login was refused ({said}). ringrun cannot type a password: put your public key there once "
        "(ssh-copy-id), or name the account as USER@HOST or the key with -i. By hand: {hand}",
    ),
    (
        r"Connection refused",
        "nothing accepts ssh there ({said}). Is sshd running on it, and on this port (-p, or Port in "
        "~/.ssh/config)? By hand: {hand}",
    ),
    (
        r"timed out|No route to host|Network is unreachable|Host is down",
        "it cannot be reached ({said}; ssh was given {timeout_s} s to connect). Is it switched on, on "
        "this network, and not behind a firewall? By hand: {hand}",
    ),
    (
        r"Bad configuration option|Bad owner or permissions|terminating, \d+ bad",
        "ssh does not accept its configuration: {said}. By hand: {hand}",
    ),
)


def last_lines(text: str, count: int = 2, limit: int = 400) -> str:
    """The end of what a program said, on one line, for a message."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "; ".join(lines[-count:])[-limit:].rstrip(".") or "nothing"  # the sentence around it has its own


def explain_loss(host: str, status: Optional[int], stderr: str, is_local: bool) -> str:
    """Why an agent that had answered is gone."""
    how = (
        "is still open" if status is None
        else f"was ended by signal {-status}" if status < 0
        else f"ended with status {status}"
    )  # fmt: skip
    what = "the agent there" if is_local else "the ssh connection to it"
    said = last_lines(stderr)
    tail = "" if said == "nothing" else f" It said: {said}."
    return f"{host}: {what} {how} while the job was running.{tail}"
