"""The check whether a host is this machine, so that its ranks start without ssh.

This machine's host name is compared as text only: its address is not usable (Debian maps it to 127.0.1.1).
The name that the user gave is resolved, and its addresses are compared with this machine's.
"""

from __future__ import annotations

import getpass
import socket
import threading
from typing import Callable, Dict, FrozenSet, Iterable, List, Sequence

from ringcomm.configuration.endpoints import Numeric, numeric

from ..plan.hosts import HostSpec
from .base import CommandReach, other_python
from .protocol import BOOT

LOOKUP_LIMIT_S = 2.0
"""Time limit of name resolution, in seconds. After it the host counts as remote: ssh reports the error."""


class ThisMachine(CommandReach):
    """Starts programs on this machine."""

    connection = "the agent there"
    description = "this machine, no ssh"

    def argv(self, spec: HostSpec, python: str) -> List[str]:
        return [python, "-c", BOOT]

    def explain_unstarted(self, host: str, argv: Sequence[str], python: str, why: str) -> str:
        """Return why the interpreter could not be started."""
        return f"{host}: there is no Python at {python} that can be started ({why}). {other_python(host)}"


def is_own(addresses: Iterable[str], own: FrozenSet[Numeric]) -> bool:
    """Return whether any of a host's addresses is one of this machine's (``own``) or a loopback. Pure."""
    found = [numeric(text) for text in addresses]
    return any(address in own or address.is_loopback for address in found if address is not None)


def is_own_name(name: str, hostname: str) -> bool:
    """Return whether a name is this machine's host name or a name of the loopback, by text. Pure."""
    given, own = name.lower().rstrip("."), hostname.lower().rstrip(".")
    if given in ("localhost", "localhost.localdomain", own):
        return True
    # The first label of this machine's name matches. A longer name than this machine's may be another host.
    return bool(given) and "." not in given and given == own.split(".")[0]


def own_addresses() -> FrozenSet[Numeric]:
    """Return every address of every interface of this machine."""
    from ringcomm.transport.nics import listed

    found = (numeric(address) for _, address, _ in listed())
    return frozenset(address for address in found if address is not None)


def find_local(
    specs: Sequence[HostSpec], more_names: Sequence[str] = (),
    by_name: Callable[[HostSpec], bool] = lambda spec: False,
) -> List[bool]:  # fmt: skip
    """Return whether each host is this machine; names are resolved in parallel. A host with another user
    before the @ counts as remote, because its ranks need a login. `more_names` are further names of this
    machine; `by_name` tells whether a host's name alone decides, as for containers, whose names are not in
    the network.
    """
    hostname, user, own = socket.gethostname(), own_user(), own_addresses()
    answers: Dict[str, List[str]] = {}
    threads: List[threading.Thread] = []

    def is_named(spec: HostSpec) -> bool:
        return spec.name in more_names or is_own_name(spec.name, hostname)

    for spec in specs:
        if not is_named(spec) and not by_name(spec) and spec.name not in answers:
            answers[spec.name] = []
            thread = threading.Thread(target=_look_up, args=(spec.name, answers), daemon=True)
            thread.start()
            threads.append(thread)
    for thread in threads:
        thread.join(LOOKUP_LIMIT_S)
    return [
        (spec.user is None or spec.user == user)
        and (is_named(spec) or is_own(answers.get(spec.name, ()), own))
        for spec in specs
    ]


def _look_up(name: str, answers: Dict[str, List[str]]) -> None:
    try:
        rows = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return  # it may be an alias in ssh's configuration; otherwise ssh reports the error
    answers[name] = [str(row[4][0]) for row in rows]


def own_user() -> str:
    """Return this user's name, or ""."""
    try:
        return getpass.getuser()
    except (KeyError, ImportError, OSError):
        return ""  # a container's uid without a name
