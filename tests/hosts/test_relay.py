"""An unprivileged user on a rank's host listens on docker0's address, which the launcher's host has too."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Dict, Iterator, List, Tuple

import numpy as np
import pytest

from ringcomm.config import Membership, Settings
from ringcomm.errors import RingcommError
from ringcomm.job.context import Context
from ringcomm.rendezvous.membership import Notice
from ringcomm.rendezvous.server import RendezvousServer
from ringcomm.storage.keys import key_text, make_certificate
from ringcomm.transport.reactor import encryption_of
from tests.hosts.netlab import Lab

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests/hosts/programs/sum.py"
DOCKER = "172.17.0.1"
KEY = b"k" * 32
SETPRIV = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")


class Attack:
    """A rendezvous here (at `real` and `twin`), and a relay on jetson1 at the address and port of `twin`."""

    def __init__(self, lab: Lab, encrypt: bool) -> None:
        self.lab = lab
        self.certificate = make_certificate() if encrypt else ""
        self.notices: List[Notice] = []
        self.server = RendezvousServer(
            key=KEY, job="job", size=2, addresses=[lab.addresses("localhost")[0], DOCKER],
            start_timeout_s=6.0, notify=self.notices.append, encryption=encryption_of(self.certificate),
        )  # fmt: skip
        self.real, self.twin = self.server.start()
        addresses = map(str, (*self.twin, *self.real))
        command = [*SETPRIV, sys.executable, "-m", "tests.support.relay", *addresses]
        self.relay = lab.popen(
            "jetson1", command, cwd=str(ROOT), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={"PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}"},
        )  # fmt: skip
        assert self.relay.stdout is not None and self.relay.stdout.readline() == "listening\n"

    def run(self, where: str, machine: str) -> Tuple[str, str, int]:
        """Start rank 0 here and rank 1 there: what each came to, and how many dialled the relay."""
        variables = {
            "RINGCOMM_SIZE": "2", "RINGCOMM_RANK": "1", "RINGCOMM_JOB": "job", "RINGCOMM_START_TIMEOUT": "6",
            "RINGCOMM_RENDEZVOUS": where, "RINGCOMM_KEY": key_text(KEY, self.certificate),
            "RINGCOMM_RENDEZVOUS_MACHINE": machine, "PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}",
        }  # fmt: skip
        with ThreadPoolExecutor(1) as pool:
            here = pool.submit(self._rank_0)
            there = self.lab.run("jetson1", [sys.executable, str(PROGRAM)], env=variables).stdout
            came, _ = self.relay.communicate("", timeout=10)
            return here.result(), there.strip(), int(came)

    def _rank_0(self) -> str:
        membership = Membership(2, (self.real,), KEY, "job", rank=0, certificate=self.certificate)
        try:
            with Context.start(membership, Settings(start_timeout_s=6.0)) as context:
                return f"sum {float(context.allreduce(np.ones(1000), op=1)[0])}"
        except RingcommError as problem:
            return f"{type(problem).__name__} {problem}"

    def close(self) -> None:
        self.relay.kill()
        self.relay.communicate()
        self.server.stop()


@pytest.fixture(params=[False, True], ids=["plain", "encrypted"])
def attack(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Attack]:
    if not os.access(ROOT, os.R_OK | os.X_OK):
        pytest.skip("another user cannot read the tests")
    attack = Attack(lab, request.param)
    yield attack
    attack.close()


def as_text(endpoint: Tuple[str, int]) -> str:
    return "{}:{}".format(*endpoint)


WORDS: Dict[str, str] = {
    "another machine": "not dialled, because this machine has that address itself",
    "": "passed on from there to another address",
}


def test_ringruns_addresses_do_not_lead_to_a_process_on_the_ranks_own_host(attack: Attack) -> None:
    """As ringrun offers them: the real one, and docker0's for later."""
    where = f"{as_text(attack.real)};{as_text(attack.twin)}"
    assert attack.run(where, "another machine") == ("sum 2.0", "sum 2.0", 0)


@pytest.mark.parametrize("machine", sorted(WORDS), ids=["machine not known", "another machine"])
def test_an_address_elsewhere_is_refused_or_passes_on_ciphertext(attack: Attack, machine: str) -> None:
    here, there, came = attack.run(as_text(attack.twin), machine)
    assert (came > 0) == (machine == "")
    if came and attack.certificate:  # what it passes on it can neither read nor change
        assert (here, there) == ("sum 2.0", "sum 2.0")
        return
    assert "Error" in here and "Error" in there, (here, there)
    assert as_text(attack.twin) in there and WORDS[machine] in there
