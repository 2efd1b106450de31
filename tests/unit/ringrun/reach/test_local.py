from __future__ import annotations

import ipaddress

import pytest

from ringrun.reach.local import is_own, is_own_name, numeric

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


def test_numeric() -> None:
    assert numeric("fe80::1%eth0") == ipaddress.ip_address("fe80::1")
    assert numeric("name") is None
