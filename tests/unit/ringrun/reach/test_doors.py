from __future__ import annotations

import ipaddress
from typing import Any, List

import pytest

from ringrun.plan.hosts import HostSpec
from ringrun.reach import doors
from ringrun.reach.doors import find_local, is_own, is_own_name

OWN = frozenset(
    [ipaddress.ip_address("10.0.0.5"), ipaddress.ip_address("fe80::5"), ipaddress.ip_address("fd00::5")]
)


@pytest.mark.parametrize(
    ("name", "hostname", "own"),
    [
        ("localhost", "pc", True),
        ("LOCALHOST", "pc", True),
        ("PC", "pc", True),
        ("pc.", "pc", True),
        ("pc", "pc.lan", True),
        ("pc.lan", "pc", False),
        ("pc.lan", "pc.office", False),
        ("pc2", "pc", False),
        ("", "", True),
    ],
)
def test_names(name: str, hostname: str, own: bool) -> None:
    assert is_own_name(name, hostname) is own


@pytest.mark.parametrize(
    ("addresses", "own"),
    [
        (["10.0.0.5"], True),
        (["10.0.0.6"], False),
        (["10.0.0.6", "fd00::5"], True),
        (["127.0.1.1"], True),
        (["::1"], True),
        (["::ffff:10.0.0.5"], True),
        (["fe80::5%eth0"], True),
        (["FD00:0::5"], True),
        (["not-an-address"], False),
        ([], False),
    ],
)
def test_addresses(addresses: list[str], own: bool) -> None:
    assert is_own(addresses, OWN) is own


def test_names_are_looked_up_once_and_a_user_needs_a_login(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: List[str] = []

    def look_up(name: str, *_: object, **__: object) -> List[Any]:
        asked.append(name)
        if name == "unknown":
            raise OSError("Name or service not known")
        address = "10.0.0.5" if name == "alias" else "10.0.0.6"
        return [(2, 1, 6, "", (address, 0))]

    monkeypatch.setattr(doors, "own_addresses", lambda: OWN)
    monkeypatch.setattr(doors.socket, "getaddrinfo", look_up)
    monkeypatch.setattr(doors.getpass, "getuser", lambda: "me")
    specs = [
        HostSpec("localhost"), HostSpec("alias"), HostSpec("alias", "me"), HostSpec("alias", "you"),
        HostSpec("far"), HostSpec("unknown"), HostSpec("node0"), HostSpec("pod"),
    ]  # fmt: skip
    found = find_local(specs, more_names=["node0"], by_name=lambda spec: spec.name == "pod")
    assert found == [True, True, True, False, False, False, True, False]
    assert sorted(asked) == ["alias", "far", "unknown"]


@pytest.mark.parametrize("problem", [KeyError("uid"), OSError("no name"), ImportError("pwd")])
def test_an_account_without_a_name(monkeypatch: pytest.MonkeyPatch, problem: Exception) -> None:
    def user() -> str:
        raise problem

    monkeypatch.setattr(doors.getpass, "getuser", user)
    assert find_local([HostSpec("localhost"), HostSpec("localhost", "me")]) == [True, False]
