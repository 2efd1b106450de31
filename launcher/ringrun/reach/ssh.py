"""The ssh command line for other hosts, and explanations of its failures. Pure.

The system's ssh runs with the user's configuration, which also governs the check of host keys. ringrun adds
only ``BatchMode`` (no prompts), a connection time limit and keepalives.
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
"""How often a login is retried after sshd dropped the connection (``MaxStartups``)."""


class SshOptions(NamedTuple):
    """How to log in.

    Attributes:
        command: the ssh command, with options if needed.
        port: the port, or None for ssh's choice.
        identity_file: the private key, or None for ssh's choice.
    """

    command: str = "ssh"
    port: Optional[int] = None
    identity_file: Optional[str] = None


class Failure(NamedTuple):
    """Why a host did not start.

    Attributes:
        text: one paragraph for the user.
        retry: whether a retry may succeed.
        no_python: whether the host does not have the interpreter.
    """

    text: str
    retry: bool = False
    no_python: bool = False


LOGINS_AT_ONCE = 8
"""Maximum number of simultaneous logins: all of them may pass through one jump host."""


def retry_delay_s(attempt: int, chance: float) -> float:
    """Seconds to wait before a retry.

    Args:
        attempt: number of the retry, from 1.
        chance: a random number from 0 to 1, so that hosts do not retry at the same time.
    """
    return (0.3 + chance) * float(2 ** (attempt - 1))


def quoted_path(path: str) -> str:
    """A path quoted for the remote shell (sh, csh or fish). A leading ``~/`` is expanded by the shell.

    Raises:
        ConfigError: the path contains a character that these shells quote in different ways.
    """
    if re.search(r"['\\!\n]", path):
        raise ConfigError(
            f"{path!r} cannot be passed to a remote shell: it contains a quote, a backslash, an exclamation "
            "mark or a line end. Make a symbolic link without them."
        )
    if path.startswith("~/"):
        return "~/" + quoted_path(path[2:])
    return path if re.fullmatch(r"[A-Za-z0-9_./+@%:,-]+", path) else f"'{path}'"


def remote_command(python: str) -> str:
    """The command for the remote login shell. It contains no secret; secrets are sent over stdin."""
    return f"{quoted_path(python)} -c '{BOOT}'"


def ssh_argv(spec: HostSpec, python: str, options: SshOptions) -> List[str]:
    """The ssh command line that starts the agent on one host.

    Args:
        spec: the host.
        python: the interpreter on that host.
        options: how to log in.

    Raises:
        ConfigError: ``--ssh`` cannot be split into words, or the interpreter's path cannot be quoted.
    """
    try:
        words = shlex.split(options.command)
    except ValueError as problem:
        raise ConfigError(f"--ssh {options.command!r} cannot be parsed: {problem}.") from None
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
    """The ssh command line for an interactive login, which the user can try by hand."""
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
    """Why an ssh (or a local interpreter) ended before the agent answered.

    Args:
        host: the host's name as the user gave it.
        argv: the command line that was run.
        python: the interpreter that it was to start.
        status: its exit status, negative for a signal, None if it could not be started.
        stderr: its output.
        is_local: whether the host is this machine.
    """
    stderr = stderr.replace(BOOT, "…")  # a program that is not a Python may print its arguments
    output = last_lines(stderr)
    old = re.search(r"^ringrun-old-python ([\d.]+) ?(.*)", stderr, re.M)
    if old:
        return Failure(
            f"{host}: the Python there is too old: {old.group(2).strip() or python} is {old.group(1)}, and "
            f"ringcomm needs 3.8 or newer. {other_python(host)}"
        )
    hand = "" if is_local else login_line(argv) + " "
    if status == 255 and not is_local:
        return _ssh_failure(host, hand.strip(), stderr, output)
    if status in (126, 127) or (status == 1 and re.search(r"not found|No such file", stderr, re.I)):
        text = f"{host}: there is no Python at {python} on that host ({output}). {other_python(host)}"
        return Failure(text, no_python=True)
    how = "was ended by a signal" if status is not None and status < 0 else f"ended with status {status}"
    return Failure(
        f"{host}: {python} {how} before the agent started. Its output: {output}. "
        f"Is it a Python? Try by hand: {hand}{quoted_path(python)} --version"
    )


def other_python(host: str) -> str:
    """Instructions for a host whose interpreter is not usable."""
    return f"Choose another interpreter with --python {host}=PATH, or with python=PATH in the hostfile."


def _ssh_failure(host: str, hand: str, stderr: str, output: str) -> Failure:
    """ssh's own failures, by its output; its status is 255 for all of them."""
    if "REMOTE HOST IDENTIFICATION HAS CHANGED" in stderr:
        return Failure(
            f"{host}: its host key is not the one that was accepted earlier. Either the machine was "
            "reinstalled, or another machine intercepts the connection. Find out which; only then remove the "
            f"old key (ssh-keygen -R {host}) and accept the new one by running once by hand: {hand}"
        )
    for pattern, text in _SSH_FAILURES:
        if re.search(pattern, stderr, re.I):
            text = text.format(hand=hand, output=output, timeout_s=CONNECT_TIMEOUT_S)
            return Failure(f"{host}: {text}")
    if re.search(_DROPPED, stderr, re.I):
        return Failure(
            f"{host}: sshd dropped the connection before the login ({output}). It does so if too many logins "
            "arrive at once (MaxStartups in its sshd_config), or if it bans this address. Try again in a "
            f"moment, or try by hand: {hand}",
            retry=True,
        )
    return Failure(f"{host}: the login failed: {output}. Try by hand: {hand}")


_DROPPED = (
    r"kex_exchange_identification|ssh_exchange_identification|Connection reset by|"
    r"Connection closed by (remote host|\S+ port)"
)
_SSH_FAILURES = (
    (
        r"Could not resolve hostname|Name or service not known|nodename nor servname",
        "its name cannot be resolved ({output}). Check the spelling, use its address, or define the name in "
        "~/.ssh/config. By hand: {hand}",
    ),
    (
        r"Host key verification failed|No \S+ host key is known",
        "its host key has not been accepted on this machine yet. Run this once by hand, compare the "
        "fingerprint and answer yes: {hand}",
    ),
    (
        r"Permission denied|Too many authentication failures",
        "the login was refused ({output}). ringrun does not use passwords: install your public key there "
        "once (ssh-copy-id), or give the account as USER@HOST or the key with -i. By hand: {hand}",
    ),
    (
        r"Connection refused",
        "it does not accept ssh connections ({output}). Is sshd running on it, and on this port (-p, or Port "
        "in ~/.ssh/config)? By hand: {hand}",
    ),
    (
        r"timed out|No route to host|Network is unreachable|Host is down",
        "it cannot be reached ({output}; ssh's time limit is {timeout_s} s). Is it switched on, connected to "
        "this network, and not behind a firewall? By hand: {hand}",
    ),
    (
        r"Bad configuration option|Bad owner or permissions|terminating, \d+ bad",
        "ssh rejects its configuration: {output}. By hand: {hand}",
    ),
)


def last_lines(text: str, count: int = 2, limit: int = 400) -> str:
    """The last lines of a program's output, joined into one line for a message.

    Args:
        text: the output.
        count: number of lines.
        limit: maximum number of characters.

    Returns:
        The line without a final full stop, or "nothing".
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "; ".join(lines[-count:])[-limit:].rstrip(".") or "nothing"


def explain_loss(host: str, status: Optional[int], stderr: str, is_local: bool) -> str:
    """Why the connection to an agent that had answered has ended.

    Args:
        host: the host's name as the user gave it.
        status: exit status of ssh or of the agent, negative for a signal, None if it still runs.
        stderr: its output.
        is_local: whether the host is this machine.
    """
    how = (
        "is still open" if status is None
        else f"was ended by signal {-status}" if status < 0
        else f"ended with status {status}"
    )  # fmt: skip
    what = "the agent there" if is_local else "the ssh connection to it"
    output = last_lines(stderr)
    tail = "" if output == "nothing" else f" Its output: {output}."
    return f"{host}: {what} {how} while the job was running.{tail}"
