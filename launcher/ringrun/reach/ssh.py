"""The ssh command line for other hosts, and explanations of its failures. Pure.

The system's ssh runs with the user's configuration, which also governs the check of host keys. ringrun adds
only ``BatchMode`` (no prompts), a connection time limit and keepalives.
"""

from __future__ import annotations

import re
import shlex
from typing import List, NamedTuple, Optional, Sequence

from ringcomm.errors import ConfigError

from ..plan.hosts import HostSpec, check_host
from ..plan.reaching import Failure, last_lines
from .base import Reach, remote_command

CONNECT_TIMEOUT_S = 10
_OWN = (
    "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_TIMEOUT_S}", "-o", "ServerAliveInterval=15",
    "-o", "ServerAliveCountMax=4",
)  # fmt: skip
"""Options that ringrun adds, in addition to the user's configuration."""


class SshOptions(NamedTuple):
    """How to log in; None leaves the choice to ssh."""

    command: str = "ssh"  # with options if needed
    port: Optional[int] = None
    identity_file: Optional[str] = None  # the private key


class Ssh(Reach):
    """Reaches hosts by ssh; with `may_appear` hosts may still be starting."""

    connection = "the ssh connection to it"
    description = "ssh"

    def __init__(self, options: SshOptions, may_appear: bool = False) -> None:
        self._options, self._may_appear = options, may_appear

    def argv(self, spec: HostSpec, python: str) -> List[str]:
        options = self._options
        try:
            words = shlex.split(options.command)
        except ValueError as problem:
            raise ConfigError(f"--ssh {options.command!r} cannot be parsed: {problem}.") from None
        if not words:
            raise ConfigError("--ssh is empty. Give a command, like: --ssh 'ssh -F my_config'")
        words += _OWN
        port = spec.port or options.port
        if port:
            words += ["-p", str(port)]
        if options.identity_file is not None:
            words += ["-i", options.identity_file]
        check_host(spec, "ssh")
        # Other programs, such as dropbear's, do not take it.
        end = ["--"] if words[0].rpartition("/")[2] == "ssh" else []
        return [*words, *end, spec.target, remote_command(python)]

    def by_hand(self, argv: Sequence[str]) -> str:
        return login_line(argv) + " "

    def refused(
        self, host: str, argv: Sequence[str], status: Optional[int], output: str
    ) -> Optional[Failure]:
        """Return ssh's failure, whose status is always 255, or None."""
        if status != 255:
            return None
        failure = _ssh_failure(host, login_line(argv), output)
        if self._may_appear and re.search(_STILL_STARTING, output, re.I):
            return failure._replace(retry=True, may_appear=True)
        return failure

    def explain_unstarted(self, host: str, argv: Sequence[str], python: str, why: str) -> str:
        return (
            f"{host}: {argv[0]!r} cannot be started on this machine ({why}). "
            "Install an ssh client, or name one with --ssh."
        )


def login_line(argv: Sequence[str]) -> str:
    """Return the ssh command line for an interactive login, which the user can try."""
    return shlex.join(argv[:-1]).replace(shlex.join(_OWN) + " ", "").replace(" -- ", " ")


def _ssh_failure(host: str, hand: str, stderr: str) -> Failure:
    """Return the failure that ssh's output shows."""
    output = last_lines(stderr)
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


_NO_NAME = r"Could not resolve hostname|Name or service not known|nodename nor servname"
_STILL_STARTING = (
    _NO_NAME + r"|Connection refused|Connection closed by|Connection reset by|timed out|No route to host"
)
_DROPPED = (
    r"kex_exchange_identification|ssh_exchange_identification|Connection reset by|"
    r"Connection closed by (remote host|\S+ port)"
)
_SSH_FAILURES = (
    (
        _NO_NAME,
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
