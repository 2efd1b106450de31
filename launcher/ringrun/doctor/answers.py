"""The forms of hosts' answers to the doctor and to ``ringrun clean``. Pure."""

from __future__ import annotations

import ipaddress
import re
from typing import Any, Callable, Dict, List, Mapping

from ringcomm.transport.kinds import LOCAL, LOOPBACK, PREFERENCE
from ringcomm.transport.routes import Attempt

from ..plan.reaching import quoted
from ..reach.incoming import (
    Form,
    amount,
    fields,
    flag,
    items,
    maybe,
    number,
    one_of,
    row,
    said,
    table,
    text,
    whole,
)
from .facts import PACKAGES

_BYTES = maybe(whole(0, 1 << 63))
MAX_ROWS = 10_000
_UNIX = re.compile(r"@ringcomm-\w{1,64}", re.ASCII)
_SPEED = number(0, 1e9)


def _word(value: Any) -> str:
    """Return a name like ``eth0``, quoted if it could be taken for more."""
    word: str = text(64)(value)
    return word if word.isprintable() and " " not in word else quoted(word)


def _address(value: Any) -> str:
    ipaddress.ip_address(text(64)(value))
    return str(value)


def _network(value: Any) -> List[Any]:
    """Return an address and the length of its network's prefix."""
    address, bits = row(_address, whole(0, 128))(value)
    ipaddress.ip_interface(f"{address}/{bits}")
    return [address, bits]


_INTERFACE = fields(
    {
        "name": _word, "mac": maybe(text(64, r"[\w:]*")),
        "speed_mbit": maybe(whole(-1)), "wireless": flag, "virtual": flag,
        "power_save": maybe(flag),
        "addresses": items(_network, 1000),
    }
)  # fmt: skip
_CPU = fields(
    {
        "cores": maybe(amount), "all_cores": whole(1), "quota": maybe(amount), "throttled": amount,
        "governor": maybe(said(64)), "mhz": row(maybe(whole()), maybe(whole())), "hottest": maybe(number()),
        "load": amount, "waited": maybe(amount), "power_mode": maybe(said(64)),
    }
)  # fmt: skip
_FACTS = fields(
    {
        "hostname": said(255), "own_name": maybe(_address), "machine_id": maybe(text(64, r"\w*")),
        "python": text(40, r"[\w.+-]+"), "executable": said(),
        "packages": table(one_of(*PACKAGES), maybe(text(100, r"[\w.+!?-]+")), len(PACKAGES)),
        "interfaces": items(_INTERFACE, 1000), "cpu": _CPU,
        "memory": fields(dict.fromkeys(("total", "available", "swap", "swap_free"), _BYTES)),
        "disks": table(said(), _BYTES, 10), "cwd_exists": flag,
        "limits": fields({"nofile": whole(-1, 1 << 63), "ptrace_scope": maybe(whole())}),
        "threads": table(one_of("OMP_NUM_THREADS"), text(1000), 1), "time_s": amount,
    }
)  # fmt: skip
_OFFER = fields(
    {
        "iface": _word, "port": whole(0, 65535), "kind": one_of(*PREFERENCE, LOOPBACK, LOCAL),
        "address": lambda value: value if _UNIX.fullmatch(str(value)) else _address(value),
    }
)  # fmt: skip
_LISTENS = fields({"addresses": items(_OFFER, 1000), "machine": text(64, r"\w*"), "time_s": amount})
_CANNOT_LISTEN = fields({"problem": said()})
_THINGS = one_of("package", "shipped files", "job folder", "agent program", "folder of records")
_CLEANED = fields(
    {
        "removed": items(row(_THINGS, said(8192), whole(0, 1 << 63)), MAX_ROWS),
        "kept": items(row(said(8192), said(8192)), MAX_ROWS),
    }
)


def _listening(value: Any) -> Dict[str, Any]:
    form = _CANNOT_LISTEN if isinstance(value, dict) and "problem" in value else _LISTENS
    found: Dict[str, Any] = form(value)
    return found


def _attempts(command: Mapping[str, Any]) -> Form:
    """Return the form of the results of dialling, limited to the hosts and addresses of the command."""
    targets = {to["rank"]: [each["address"] for each in to["addresses"]] for to in command["targets"]}
    form = fields(
        {
            "source": whole(), "target": one_of(*targets), "address": text(120), "port": whole(0, 65535),
            "local": text(120, r"[\w.:%@-]*"), "local_iface": _word, "remote_iface": _word,
            "kind": one_of(*PREFERENCE), "why": text(400), "mb_per_s": maybe(_SPEED), "too_slow": flag,
        }
    )  # fmt: skip

    def attempt(value: Any) -> Attempt:
        found = Attempt(**form(value))
        if found.address not in targets[found.target]:
            raise ValueError(f"an address that was not to be dialled: {found.address[:60]!a}")
        return found

    # An address that does not answer is dialled again, until the time is over.
    return items(attempt, 100 * sum(map(len, targets.values())))


def _speeds(command: Mapping[str, Any]) -> Form:
    """Return the form of measurements, limited to the wires of the command."""
    pairs = command["pairs"]
    form = fields(
        {
            "rank": one_of(*(pair["rank"] for pair in pairs)), "address": text(120), "iface": _word,
            "mb_per_s": _SPEED, "there_mb_per_s": _SPEED, "back_mb_per_s": _SPEED,
        }
    )  # fmt: skip
    return items(form, sum(len(pair["wires"]) for pair in pairs))


FORMS: Dict[str, Callable[[Mapping[str, Any]], Form]] = {
    "facts": lambda command: _FACTS, "listen": lambda command: _listening, "clean": lambda command: _CLEANED,
    "probe": _attempts, "measure": _speeds,
}  # fmt: skip
"""The form of the answer by the kind of command, from the whole command."""
