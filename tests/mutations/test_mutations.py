"""Known bugs, put into a copy of ringcomm one at a time: the tests that should notice do.

Each is one that such systems have had. The text it replaces must be there, so a change to the code cannot
quietly turn a bug into none.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.mutations.copies import Outcome, copy_project, run_tests

# One worker of pytest's runs them all, because each that had some would make a copy and run all tests in it.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.xdist_group("mutations")]

LIMIT_S = 240.0
HANG_S = 20
"""A test that a bug blocks has failed after so many seconds; without the bug it takes a few milliseconds."""


class Bug(NamedTuple):
    """What is put in place of what, and which tests should fail then (a file, and words for ``-k``)."""

    file: str
    right: str
    wrong: str
    tests: str
    words: str


BUGS = {
    "a received 0 taken for 'try again'": Bug(
        "transport/tcp.py",
        "if got == 0 and any(view.nbytes for view in views):",
        "if got < 0:",
        "tests/integration/transport/test_links.py",
        "check_end_with_several_views and tcp",
    ),
    "the end of an encrypted stream taken for 'try again'": Bug(
        "transport/tls.py",
        "        while not got and not self._ended:\n",
        "        if self._ended:\n            raise BlockingIOError\n        while not got:\n",
        "tests/integration/transport/test_links.py",
        "check_end_with_several_views and tls",
    ),
    "a generation ignored in a handshake": Bug(
        "rendezvous/links.py",
        "if claim.target != self.rank or claim.generation != self.generation:",
        "if claim.target != self.rank:",
        "tests/integration/rendezvous/test_mesh.py",
        "others_of_the_same_job_are_sent_away",
    ),
    "a generation ignored in headers": Bug(
        "wire/frames.py",
        "            self.generation & 0xFFFF,\n",
        "            0,\n",
        "tests/unit/wire/test_frames.py",
        "bytes_on_the_wire_never_change",
    ),
    "one abort not sent": Bug(
        "rendezvous/epoch.py",
        "[Send(connection, self.abort_message) for connection in self.members]",
        "[Send(connection, self.abort_message) for connection in list(self.members)[1:]]",
        "tests/unit/rendezvous/test_state.py",
        "aborted_exactly_once",
    ),
    "an off-by-one chunk": Bug(
        "schedule/ring.py",
        "incoming = (rank - 2 - hop) % size  # ends with incoming == rank",
        "incoming = (rank - 1 - hop) % size",
        "tests/unit/schedule/test_ring.py",
        "all_reduce_of_all_sizes",
    ),
    "a chunk that ends one element early": Bug(
        "schedule/ring.py",
        "last = hop == size - 2\n        steps.append(Send(right, bounds[outgoing], bounds[outgoing + 1]))",
        "last = hop == size - 2\n"
        "        steps.append(Send(right, bounds[outgoing], bounds[outgoing + 1] - 1))",
        "tests/unit/schedule/test_ring.py",
        "all_reduce_of_all_sizes",
    ),
    "a port that takes any proof": Bug(
        "wire/auth.py",
        "        if not hmac.compare_digest(\n            self._received,",
        "        if False and not hmac.compare_digest(\n            self._received,",
        "tests/unit/wire/test_auth.py",
        "responder_refuses_an_initiator_with_another_key",
    ),
    "a dial that accepts any responder as the rendezvous": Bug(
        "wire/auth.py",
        'if not hmac.compare_digest(proof, self._proof(b"responder", nonce)):',
        'if len(proof) != len(self._proof(b"responder", nonce)):',
        "tests/unit/wire/test_auth.py",
        "initiator_refuses_a_responder_with_another_key",
    ),
    "a place that is not compared": Bug(
        "wire/auth.py",
        "        if self._place is not None and place != self._place:\n",
        "        if self._place is None and place != self._place:\n",
        "tests/integration/rendezvous/test_relay.py",
        "dials_a_relay and False",
    ),
    "a control message whose tag is not checked": Bug(
        "wire/signing.py",
        "if not hmac.compare_digest(tag, _tag(self._receiving, self._received, message)):",
        "if len(tag) != len(_tag(self._receiving, self._received, message)):",
        "tests/unit/wire/test_signing.py",
        "every_flipped_bit_is_noticed",
    ),
    "an unauthenticated port": Bug(
        "transport/accept.py",
        "            while not self.responder.done:\n",
        "            while not self.responder.challenged:\n",
        "tests/integration/transport/test_connect.py",
        "dial_that_is_not_accepted",
    ),
    "a listener that no number of unauthenticated peers closes": Bug(
        "transport/accept.py",
        "        self._keep(1)\n        if not given_up",
        "        if not given_up",
        "tests/integration/transport/test_accept.py",
        "failed_ones_keep_all_places",
    ),
    "many ranks at once taken for unauthenticated peers": Bug(
        "transport/accept.py",
        "        self.acceptor.release(self)\n        self.acceptor.arrived(",
        "        self.acceptor.failed(self, '')\n        self.acceptor.release(self)\n"
        "        self.acceptor.arrived(",
        "tests/integration/transport/test_accept.py",
        "come_together_wait_for_nothing",
    ),
    "a certificate that is not required": Bug(
        "transport/tls.py",
        "context.verify_mode = ssl.CERT_REQUIRED",
        "context.verify_mode = ssl.CERT_NONE",
        "tests/integration/transport/test_encryption.py",
        "another_certificate_or_none_is_refused or unauthenticated_peers_with_tls",
    ),
    "more bytes than the shared memory holds": Bug(
        "transport/shm.py",
        "            if ready > span:\n",
        "            if ready < 0:\n",
        "tests/integration/transport/test_local.py",
        "cannot_have_done",
    ),
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources and the tests, somewhere else."""
    return copy_project(tmp_path_factory.mktemp("mutant"))


@pytest.fixture(scope="module")
def clean(copy: Path) -> Outcome:
    """Return what all of these tests end with while there is no bug; it also compiles what they import."""
    selected = {f"({Path(bug.tests).name} and ({bug.words}))": bug.tests for bug in BUGS.values()}
    files = dict.fromkeys(selected.values())
    return run_tests(copy, [*files, "-k", " or ".join(selected)], LIMIT_S, keep_bytecode=True)


def test_the_same_tests_pass_without_any_bug(clean: Outcome) -> None:
    assert clean.code == 0, clean.output


@pytest.mark.parametrize("name", BUGS)
def test_the_suite_notices(copy: Path, clean: Outcome, name: str) -> None:
    bug = BUGS[name]
    path = copy / "ringcomm" / bug.file
    text = path.read_text()
    assert text.count(bug.right) == 1, f"{bug.file} has changed: this bug is not where it was"
    path.write_text(text.replace(bug.right, bug.wrong))
    try:
        done = run_tests(copy, [bug.tests, "-k", bug.words, "--timeout", str(HANG_S)], LIMIT_S)
    finally:
        path.write_text(text)
    # Tests that fail give 1; files that cannot even be imported give 2, no test with these words 5.
    assert done.code == 1, f"{name}: no test failed\n{done.output[-3000:]}"
