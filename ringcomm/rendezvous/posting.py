"""Posts entries at a job's rendezvous, and waits for those of other ranks.

Every call uses its own connection, which is authenticated like any other.
"""

from __future__ import annotations

import socket
from typing import Optional

from ..clock import Deadline
from ..config import Membership
from ..errors import ProtocolError, StartTimeoutError, StartupError
from ..transport.encryption import encryption_of
from ..transport.nics import machine
from ..transport.reactor import Reactor
from ..wire.auth import Claim, Purpose, job_digest
from ..wire.messages import MAX_MESSAGE_BYTES, Message, MessageReader, encode
from .connect_server import DIAL_S, reach


def post(membership: Membership, entry: str, text: str, timeout_s: float) -> None:
    """Post an entry for all ranks of the job; raises StartupError if the rendezvous does not take it."""
    _ask(membership, {"type": "post", "entry": entry, "text": text}, timeout_s)


def await_entry(membership: Membership, entry: str, timeout_s: float) -> str:
    """Return the text of an entry, as soon as a rank has posted it. Raises StartTimeoutError if none has in
    time, StartupError if the rendezvous cannot be reached or has ended.
    """
    return _ask(membership, {"type": "await", "entry": entry}, timeout_s)


def _ask(membership: Membership, message: Message, timeout_s: float) -> str:
    deadline = Deadline(timeout_s)
    claim = Claim(Purpose.CONTROL, job_digest(membership.job))
    reactor = Reactor()
    try:
        found = reach(
            reactor, membership.rendezvous, membership.key, claim, encryption_of(membership.certificate),
            min(DIAL_S, timeout_s), membership.rendezvous_last,
            membership.rendezvous_machine not in ("", machine()),
        )  # fmt: skip
    finally:
        reactor.close()
    if found.sock is None:
        raise StartupError("No answer from the job's rendezvous. Tried:\n" + "\n".join(found.tried))
    reader = MessageReader(MAX_MESSAGE_BYTES, found.session)
    with found.sock as sock:
        try:
            sock.settimeout(DIAL_S)
            sock.sendall(encode(message, found.session))
            answer = _answer(sock, reader, deadline)
        except (OSError, ProtocolError) as problem:
            raise StartupError(f"The job's rendezvous has ended during a request: {problem}.") from None
    if answer is None:
        raise StartTimeoutError(
            f"No rank has posted {message['entry']} at the job's rendezvous within {timeout_s:g} s."
        )
    return str(answer["text"])


def _answer(sock: socket.socket, reader: MessageReader, deadline: Deadline) -> Optional[Message]:
    while not deadline.expired():
        sock.settimeout(max(0.01, deadline.remaining_s()))
        try:
            data = sock.recv(65536)
        except socket.timeout:
            continue
        if not data:
            raise ConnectionError("it closed the connection")
        for message in reader.feed(data):
            if message["type"] != "entry":
                raise ProtocolError(f"it sent {message['type']!r}")
            return message
    return None
