"""Known bugs, put into a copy of ringcomm one at a time: the tests that should notice do.

Each is one that such systems have had. The text it replaces must be there, so a change to the code cannot
quietly turn a bug into none.
"""

from __future__ import annotations

from pathlib import Path
from typing import List, NamedTuple

import pytest

from tests.mutations.copies import copy_project, run_tests

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LIMIT_S = 240.0


class Bug(NamedTuple):
    """What is put in place of what, and which tests should fail then (a file, and words for ``-k``)."""

    file: str
    right: str
    wrong: str
    tests: str
    words: str = ""


BUGS = {
    "a received 0 taken for 'try again'": Bug(
        "transport/tcp.py",
        "if got == 0 and any(view.nbytes for view in views):",
        "if got < 0:",
        "tests/contract/test_links.py",
        "check_end_with_several_views and tcp",
    ),
    "the end of an encrypted stream taken for 'try again'": Bug(
        "transport/tls.py",
        "        while not got and not self._ended:\n",
        "        if self._ended:\n            raise BlockingIOError\n        while not got:\n",
        "tests/contract/test_links.py",
        "check_end_with_several_views and tls",
    ),
    "a generation ignored in a handshake": Bug(
        "rendezvous/links.py",
        "if claim.target != self.rank or claim.generation != self.generation:",
        "if claim.target != self.rank:",
        "tests/contract/test_mesh.py",
    ),
    "a generation ignored in headers": Bug(
        "wire/frames.py",
        "            self.generation & 0xFFFF,\n",
        "            0,\n",
        "tests/unit/wire/test_frames.py",
    ),
    "one abort not sent": Bug(
        "rendezvous/state.py",
        "[Send(connection, self.abort_message) for connection in connections]",
        "[Send(connection, self.abort_message) for connection in connections[1:]]",
        "tests/unit/rendezvous/test_state.py",
    ),
    "an off-by-one chunk": Bug(
        "schedule/ring.py",
        "incoming = (rank - 2 - hop) % size  # ends with incoming == rank",
        "incoming = (rank - 1 - hop) % size",
        "tests/unit/schedule/test_ring.py",
    ),
    "a chunk that ends one element early": Bug(
        "schedule/ring.py",
        "last = hop == size - 2\n        steps.append(Send(right, bounds[outgoing], bounds[outgoing + 1]))",
        "last = hop == size - 2\n"
        "        steps.append(Send(right, bounds[outgoing], bounds[outgoing + 1] - 1))",
        "tests/unit/schedule/test_ring.py",
    ),
    "a port that takes any proof": Bug(
        "wire/auth.py",
        "        if not hmac.compare_digest(\n            self._received,",
        "        if False and not hmac.compare_digest(\n            self._received,",
        "tests/unit/wire/test_auth.py",
    ),
    "a dial that accepts any responder as the rendezvous": Bug(
        "wire/auth.py",
        'if not hmac.compare_digest(proof, self._proof(b"responder", nonce)):',
        'if len(proof) != len(self._proof(b"responder", nonce)):',
        "tests/unit/wire/test_auth.py",
    ),
    "a place that is not compared": Bug(
        "wire/auth.py",
        "        if self._place is not None and place != self._place:\n",
        "        if self._place is None and place != self._place:\n",
        "tests/contract/test_relay.py",
        "dials_a_relay and False",
    ),
    "a control message whose tag is not checked": Bug(
        "wire/signing.py",
        "if not hmac.compare_digest(tag, _tag(self._receiving, self._received, message)):",
        "if len(tag) != len(_tag(self._receiving, self._received, message)):",
        "tests/unit/wire/test_signing.py",
    ),
    "an unauthenticated port": Bug(
        "transport/accept.py",
        "            while not self.responder.done:\n",
        "            while not self.responder.challenged:\n",
        "tests/contract/test_connect.py",
    ),
    "a listener that no number of unauthenticated peers closes": Bug(
        "transport/accept.py",
        "        self._allowance.spend(half_open.costs)\n",
        "",
        "tests/contract/test_accept.py",
    ),
    "many ranks at once taken for unauthenticated peers": Bug(
        "transport/accept.py",
        "        self.acceptor.release(self)\n        self.acceptor.arrived(",
        "        self.acceptor.failed(self, '')\n        self.acceptor.release(self)\n"
        "        self.acceptor.arrived(",
        "tests/contract/test_accept.py",
    ),
    "a certificate that is not required": Bug(
        "transport/tls.py",
        "context.verify_mode = ssl.CERT_REQUIRED",
        "context.verify_mode = ssl.CERT_NONE",
        "tests/contract/test_encryption.py",
    ),
    "more bytes than the shared memory holds": Bug(
        "transport/shm.py",
        "            if ready > self._in_size:\n",
        "            if ready < 0:\n",
        "tests/contract/test_local.py",
        "cannot_have_done",
    ),
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources and the tests, somewhere else."""
    return copy_project(tmp_path_factory.mktemp("mutant"))


def selection(bug: Bug) -> List[str]:
    return [bug.tests, *(["-k", bug.words] if bug.words else [])]


def test_the_same_tests_pass_without_any_bug(copy: Path) -> None:
    for arguments in {tuple(selection(bug)): None for bug in BUGS.values()}:
        done = run_tests(copy, list(arguments), LIMIT_S)
        assert done.code == 0, done.output


@pytest.mark.parametrize("name", BUGS)
def test_the_suite_notices(copy: Path, name: str) -> None:
    bug = BUGS[name]
    path = copy / "ringcomm" / bug.file
    text = path.read_text()
    assert text.count(bug.right) == 1, f"{bug.file} has changed: this bug is not where it was"
    path.write_text(text.replace(bug.right, bug.wrong))
    try:
        done = run_tests(copy, selection(bug), LIMIT_S)
    finally:
        path.write_text(text)
    # Tests that fail give 1; files that cannot even be imported give 2.
    assert done.code == 1, f"{name}: no test failed\n{done.output[-3000:]}"
