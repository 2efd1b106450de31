from __future__ import annotations

import ipaddress

import pytest

from ringcomm.configuration.endpoints import is_loopback, numeric


@pytest.mark.parametrize(
    "host, found",
    [
        ("127.0.0.9", True), ("::1", True), ("::ffff:127.0.0.1", True), ("localhost", True),
        ("10.0.0.1", False), ("fe80::1%eth0", False), ("desk", False), ("", False),
    ],
)  # fmt: skip
def test_which_hosts_mean_this_machine_only(host: str, found: bool) -> None:
    assert is_loopback(host) is found


def test_an_address_has_no_scope_and_is_ipv4_if_it_can_be() -> None:
    assert numeric("fe80::1%eth0") == ipaddress.ip_address("fe80::1")
    assert numeric("::ffff:10.0.0.1") == ipaddress.ip_address("10.0.0.1")
    assert numeric("localhost") is numeric("") is None
