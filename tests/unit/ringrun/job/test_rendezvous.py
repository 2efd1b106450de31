"""The addresses of the rendezvous on a machine whose interfaces are given."""

from __future__ import annotations

from typing import List

import pytest

from ringcomm.errors import ConfigError
from ringcomm.transport import nics
from ringrun.job.launch import prepare
from ringrun.job.rendezvous import rendezvous_addresses, rendezvous_variables
from ringrun.join.invitation import Joined
from ringrun.plan.hosts import HostSpec
from ringrun.plan.options import Options

WIRED = nics.Interface("eth0", "192.0.2.1", nics.WIRED, 24)
LINK_LOCAL = nics.Interface("eth0", "fe80::1", nics.WIRED, 64, scope=2)
LOOPBACK = nics.Interface("lo", "127.0.0.1", nics.LOOPBACK, 8)


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> List[nics.Interface]:
    """This machine's, which a test chooses."""
    found: List[nics.Interface] = []
    monkeypatch.setattr(nics, "own_addresses", lambda spec="": found if spec != "none" else [])
    return found


@pytest.mark.parametrize(
    ("ifaces", "text"),
    [((), "except the loopback's, but"), (("none",), "loopback's that matches --iface none, but")],
)
def test_a_machine_that_other_hosts_cannot_reach(
    interfaces: List[nics.Interface], ifaces: tuple, text: str
) -> None:
    interfaces += [LINK_LOCAL, LOOPBACK]
    job = prepare(Options(hosts="localhost,far", iface=ifaces), ["true"], {"PATH": "/"})
    with pytest.raises(ConfigError, match=text):
        rendezvous_addresses(job)


@pytest.mark.parametrize("login", ["203.0.113.9 43117 10.0.0.2 5", "203.0.113.9 x 10.0.0.2 5", ""])
def test_a_machine_that_has_joined_gets_the_address_that_it_has_dialled(
    interfaces: List[nics.Interface], login: str
) -> None:
    """A router forwards that port. The job encrypts, so that the proof does not cover the address."""
    interfaces += [WIRED, LOOPBACK]
    way = Joined()
    way.dials_port = True
    joined = [(HostSpec("desk", slots=1), way)]
    job = prepare(Options(hosts="localhost,join:1@43117"), ["true"], {"PATH": "/"}, joined=joined)
    assert job.port == 43117 and job.certificate
    found = [
        rendezvous_variables([(WIRED.address, 43117)], host, {"login": login})["RINGCOMM_RENDEZVOUS"]
        for host in job.hosts
    ]
    forwarded = ",203.0.113.9:43117" if "9 43117" in login else ""
    assert found == ["192.0.2.1:43117", f"192.0.2.1:43117{forwarded}"]
