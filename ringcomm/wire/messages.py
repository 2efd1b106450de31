"""Control messages: JSON objects with a length in front, checked before they are used.

They travel between ranks and the rendezvous, after the handshake. JSON because a reader needs no code to
understand it and because decoding it cannot run any; small because every kind has a cap. Each ends with a tag
by which the connection's :class:`~.auth.Session` authenticates it.
"""

from __future__ import annotations

import ipaddress
import json
import struct
from typing import Any, Dict, Iterator, Mapping, Optional, Tuple

from ..errors import ProtocolError
from .auth import Session

Message = Dict[str, Any]

_LENGTH = struct.Struct("!I")
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""Cap for a message from the rendezvous (the table of a few hundred ranks)."""
MAX_REPORT_BYTES = 256 * 1024
"""Cap for a message from a rank."""
MAX_RESPONSES_BYTES = 64 * 1024 * 1024
"""Cap for messages between engines: they may name every tensor of a large model at once."""
MAX_PAYLOAD_BYTES = 1024 * 1024
"""Cap for the elements that follow a repeat."""
_REPEAT = struct.Struct("!IIIII")
_REPEAT_LENGTH = 1 << 31 | _REPEAT.size
"""In place of a length: a message of the kind ``repeat``, which is sent in every step of a training. It is no
JSON: epoch, number, set, count, and how many bytes follow its tag. These have no tag, as in collectives."""
_MAX_NAME_BYTES = 100

_encode = json.JSONEncoder(separators=(",", ":")).encode

_FIELDS: Mapping[str, Mapping[str, Tuple[type, ...]]] = {
    # from a rank to the rendezvous
    "join": {"version": (str,), "hostname": (str,), "pid": (int,), "addresses": (list,)},
    "count": {},
    "probed": {"attempts": (list,)},
    "measured": {"speeds": (list,)},
    "linked": {"links": (list,)},
    "unlinked": {"reason": (str,), "peer": (int,)},
    "lost": {"peer": (int,), "doing": (str,), "why": (str,), "kind": (str,)},
    "mismatch": {"peer": (int,), "text": (str,)},
    "note": {"text": (str,)},
    "warning": {"topic": (str,), "text": (str,)},
    "leaving": {"reason": (str,), "ok": (bool,)},
    "short": {"text": (str,)},
    "closed": {"peer": (int,), "why": (str,)},
    "interrupted": {"doing": (str,), "why": (str,)},
    "pong": {"heard": (list,), "silent": (list,)},
    "post": {"entry": (str,), "text": (str,)},
    "await": {"entry": (str,)},
    "change": {"entry": (str,), "how": (str,), "text": (str,), "before": (str,)},
    # from the rendezvous to a rank
    "entry": {"entry": (str,), "text": (str,)},
    "refused": {"reason": (str,)},
    "probe": {"rank": (int,), "generation": (int,), "members": (list,), "targets": (list,)},
    "measure": {"pairs": (list,)},
    "link": {"routes": (list,)},
    "go": {"table": (str,)},
    "abort": {"kind": (str,), "text": (str,)},
    "ping": {},
    "waiting": {"member": (int,)},
    "updated": {"change": (int,)},
    "announced": {},
    "counted": {"size": (int,)},
    "excluded": {"reason": (str,)},
    # between any two engines
    "beat": {"calls": (list,), "engine": (list,)},
    "bye": {},
    # from an engine to the one of rank 0
    "ready": {"operations": (list,), "sites": (list,), "urgent": (bool,)},
    "blocked": {"heard": (int,), "for_good": (bool,), "calls": (int,), "call": (list,)},
    "unblocked": {},
    "joined": {},
    "paused": {"reason": (str,)},
    "resumed": {},
    "stack": {"text": (str,)},
    "stuck": {"epoch": (int,)},
    "stopped": {"epoch": (int,), "number": (int,), "set": (int,), "count": (int,)},
    "trace": {"events": (list,)},
    "clock": {"sent_us": (float, int), "there_us": (float, int)},
    # from the engine of rank 0 to the others
    "explain": {},
    "stop": {"epoch": (int,)},
    "negotiate": {"epoch": (int,), "last": (int,)},
    "responses": {
        "fresh": (list,), "settled": (list,), "run": (list,), "failed": (list,), "joined": (int,),
        "repeats": (list,),
    },
    # between ranks, on a probe connection
    "echo": {"rank": (int,)},
}  # fmt: skip

_ITEMS: Mapping[Tuple[str, str], Mapping[str, Tuple[type, ...]]] = {
    # what the objects in a list must have
    ("join", "addresses"): {"address": (str,), "port": (int,), "iface": (str,), "kind": (str,)},
    ("linked", "links"): {"iface": (str,), "local": (str,), "peers": (list,)},
    ("probe", "members"): {
        "rank": (int,), "host": (str,), "host_index": (int,), "local_rank": (int,), "pid": (int,)
    },
    ("measured", "speeds"): {"rank": (int,), "address": (str,), "iface": (str,), "mb_per_s": (float, int)},
    ("measure", "pairs"): {"rank": (int,), "wires": (list,)},
    ("probe", "targets"): {"rank": (int,), "addresses": (list,)},
    ("link", "routes"): {"peer": (int,), "dial": (bool,), "addresses": (list,), "iface": (str,)},
}  # fmt: skip

_RANGES = (("pong", "heard"), ("pong", "silent"))
"""Lists of ranges of ranks: each its first and its last."""

_ADDRESS = _ITEMS["join", "addresses"]
_WHOLE = range(-(2**31), 2**31)
"""Ranks, generations, ports and process ids: the range of the fields that they are stored in."""


def encode(message: Message, session: Optional[Session] = None) -> bytes:
    """Return one message as it travels: four bytes of length, UTF-8 JSON, and a tag if there is a session."""
    return framed(body_of(message), session)


def body_of(message: Message) -> bytes:
    """Return a message without its length and tag, the same for all receivers."""
    return _encode(message).encode("utf-8")


def framed(body: bytes, session: Optional[Session]) -> bytes:
    """Return a message as it travels, see :func:`encode`."""
    data = _LENGTH.pack(len(body)) + body
    return data if session is None else data + session.tag(data)


def repeat_framed(message: Message, session: Optional[Session]) -> bytes:
    """A message of the kind ``repeat`` as it travels, without the plain bytes that follow it."""
    data = _LENGTH.pack(_REPEAT_LENGTH) + _REPEAT.pack(
        message["epoch"], message["number"], message["set"], message["count"], message["bytes"]
    )
    return data if session is None else data + session.tag(data)


def validate(message: Any) -> Message:
    """Return the message; raises ProtocolError unless it is an object of a known kind with all fields."""
    if not isinstance(message, dict):
        raise ProtocolError(f"a control message must be an object, not {type(message).__name__}")
    kind = message.get("type")
    wanted = _FIELDS.get(kind) if isinstance(kind, str) else None
    if wanted is None:
        raise ProtocolError(f"unknown kind of control message: {kind!r}")
    _check_fields(f"control message {kind!r}", message, wanted)
    for name in wanted:
        if (kind, name) in _RANGES and not all(map(is_range, message[name])):
            raise ProtocolError(f"control message {kind!r}: field {name!r} is not a list of ranges of ranks")
        items = _ITEMS.get((str(kind), name))
        if items is not None:
            for item in message[name]:
                where = f"control message {kind!r}, an item of {name!r}"
                _check_fields(where, item, items)
                if items is _ADDRESS:
                    _check_address(where, item)
                for address in [
                    entry for key in ("addresses", "wires") if key in items for entry in item[key]
                ]:
                    _check_fields(f"{where}, an address", address, _ADDRESS)
                    _check_address(where, address)
    return message


def is_range(item: Any) -> bool:
    """Return whether an item of a message is a range of ranks: its first and its last."""
    whole = isinstance(item, list) and len(item) == 2 and all(type(end) is int for end in item)
    return whole and 0 <= item[0] <= item[1] and item[1] in _WHOLE


def _check_fields(where: str, data: Any, wanted: Mapping[str, Tuple[type, ...]]) -> None:
    if not isinstance(data, dict):
        raise ProtocolError(f"{where}: must be an object, not {type(data).__name__}")
    for name, types in wanted.items():
        value = data.get(name)
        # In Python True is an int; in a message it is not.
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise ProtocolError(f"{where}: field {name!r} is missing or not {types[0].__name__}")
        if types == (int,) and value not in _WHOLE:
            raise ProtocolError(f"{where}: field {name!r} is out of range")


def _check_address(where: str, item: Mapping[str, Any]) -> None:
    """Raise ProtocolError unless an address is numeric (no name is looked up) or a socket of this host."""
    address = str(item["address"])
    try:
        if not address.startswith("@"):
            ipaddress.ip_address(address)
        elif "\0" in address or len(address.encode()) > _MAX_NAME_BYTES:
            raise ValueError("no name of a socket")
    except ValueError:
        raise ProtocolError(f"{where}: {address[:60]!r} is no address") from None
    if not 0 <= item["port"] <= 65535:
        raise ProtocolError(f"{where}: {item['port']} is no port")


class MessageReader:
    """Assembles messages from pieces; refuses one beyond ``limit_bytes`` before its body is read.
    ``repeats``: messages of the kind ``repeat`` may come, as between engines.
    """

    def __init__(self, limit_bytes: int, session: Optional[Session] = None, repeats: bool = False) -> None:
        self._limit = limit_bytes
        self._repeats = repeats
        self._session = session
        self._tag_bytes = 0 if session is None else Session.TAG_BYTES
        self._buffer = bytearray()
        self._incomplete: Optional[Message] = None  # whose payload has not arrived

    def feed(self, data: bytes) -> Iterator[Message]:
        """Take bytes; yield every complete message. ProtocolError if one is too long, altered, or unknown."""
        self._buffer += data
        while self._incomplete is not None or len(self._buffer) >= _LENGTH.size:
            if self._incomplete is not None:
                message, count = self._incomplete, self._incomplete["bytes"]
                if len(self._buffer) < count:
                    return
                message["payload"], self._incomplete = self._buffer[:count], None
                del self._buffer[:count]
                yield message
                continue
            (length,) = _LENGTH.unpack_from(self._buffer)
            repeats = length == _REPEAT_LENGTH and self._repeats
            if repeats:
                length = _REPEAT.size
            if length > self._limit:
                raise ProtocolError(f"a control message of {length} bytes; at most {self._limit} are allowed")
            end = _LENGTH.size + length
            if len(self._buffer) < end + self._tag_bytes:
                return
            whole = bytes(self._buffer[: end + self._tag_bytes])
            del self._buffer[: end + self._tag_bytes]
            if self._session is not None:
                self._session.check(whole[:end], whole[end:])
            body = whole[_LENGTH.size : end]
            if repeats:
                self._incomplete = _repeat(body)
                continue
            try:
                message = json.loads(body.decode("utf-8"))
            except (UnicodeDecodeError, ValueError, RecursionError) as problem:
                raise ProtocolError(f"a control message that is not JSON: {problem}") from None
            yield validate(message)


def _repeat(body: bytes) -> Message:
    epoch, number, repeated, count, nbytes = _REPEAT.unpack(body)
    if nbytes > MAX_PAYLOAD_BYTES:
        raise ProtocolError(f"a repeat of {nbytes} bytes; at most {MAX_PAYLOAD_BYTES} are allowed")
    return {
        "type": "repeat", "epoch": epoch, "number": number, "set": repeated, "count": count, "bytes": nbytes
    }  # fmt: skip
