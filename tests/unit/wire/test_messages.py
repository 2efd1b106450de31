"""Control messages: put together from pieces, and refused when they are not what they must be."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from ringcomm.errors import ProtocolError
from ringcomm.wire.auth import session_of
from ringcomm.wire.messages import (
    _FIELDS,
    MAX_REPORT_BYTES,
    MessageReader,
    encode,
    repeat_framed,
    validate,
)

ADDRESS = {"address": "10.0.0.1", "port": 5000, "iface": "eth0", "kind": "wired"}
MEMBER = {"rank": 0, "host": "a", "host_index": 0, "local_rank": 0, "pid": 1}
GOOD = [
    {"type": "join", "version": "1", "hostname": "h", "pid": 12, "addresses": [ADDRESS], "slot": [0, 1]},
    {"type": "probed", "attempts": []},
    {"type": "measured", "speeds": [{"rank": 1, "address": "10.0.0.1", "iface": "eth0", "mb_per_s": 2.5}]},
    {"type": "measure", "pairs": [{"rank": 1, "wires": [ADDRESS]}]},
    {"type": "linked", "links": [{"iface": "eth0", "local": "a", "peers": [[1, 3]]}]},
    {"type": "lost", "peer": 2, "doing": "allreduce", "why": "grüße \N{SNOWMAN}", "kind": "lost"},
    {"type": "leaving", "reason": "done", "ok": True},
    {
        "type": "probe", "rank": 0, "generation": 3, "members": [MEMBER],
        "targets": [{"rank": 1, "addresses": [ADDRESS]}],
    },
    {"type": "link", "routes": [{"peer": 1, "dial": False, "addresses": [], "iface": "eth0"}]},
    {"type": "abort", "kind": "lost", "text": "rank 1 died", "rank": None},
]


def frame(body):
    return struct.pack("!I", len(body)) + body


def read(data, piece=None, limit=MAX_REPORT_BYTES):
    reader = MessageReader(limit)
    piece = piece or max(1, len(data))
    return [
        message
        for start in range(0, len(data), piece)
        for message in reader.feed(data[start : start + piece])
    ]


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_all_of_them_in_pieces(piece):
    assert read(b"".join(map(encode, GOOD)), piece) == GOOD

# ---- size ------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [101, 2**32 - 1])
def test_oversize_is_refused_by_its_length_alone(length):
    with pytest.raises(ProtocolError, match=f"a control message of {length} bytes; at most 100"):
        read(struct.pack("!I", length), limit=100)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"\xff\xfe", b'{"type": "go", "table": "\xff"}', b'{"type": "go"} trailing',
        b'{"type": "leaving", "ok": ' + b"1" * 200_000,
    ],
)
def test_what_is_no_json(body):
    with pytest.raises(ProtocolError, match="not JSON"):
        read(frame(body))


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'{"type":"go","table":['])
def test_deep_nesting_is_refused_without_a_crash(opening):
    with pytest.raises(ProtocolError):
        read(frame(opening * (MAX_REPORT_BYTES // len(opening))))


@pytest.mark.parametrize("kind", [None, "Join", ["join"]])
def test_unknown_kind(kind):
    with pytest.raises(ProtocolError, match="unknown kind"):
        validate({"type": kind})


WRONG = [None, True, 1.5, "text", [], {}, {"a": 1}]
REQUIRED = [
    (message, name)
    for message in GOOD
    for name in message
    if name != "type" and (message["type"], name) not in (("join", "slot"), ("abort", "rank"))
]


@pytest.mark.parametrize(
    "message, name", REQUIRED, ids=lambda item: item if isinstance(item, str) else item["type"]
)
def test_missing_or_wrong_field_is_named(message, name):
    without = {key: value for key, value in message.items() if key != name}
    with pytest.raises(ProtocolError, match=f"{message['type']}.*{name}"):
        validate(without)
    for value in WRONG:
        if type(value) is not type(message[name]):
            with pytest.raises(ProtocolError, match=f"{message['type']}.*{name}"):
                validate({**message, name: value})


@pytest.mark.parametrize("item", [None, "12", [1], [2, 1], [-1, 1], [1, True], [0, 2**40]])
@pytest.mark.parametrize("field", ["heard", "silent"])
def test_lists_of_ranges_of_ranks_hold_nothing_else(field, item):
    good = {"type": "pong", "heard": [[0, 1], [3, 3]], "silent": [[2, 2]]}
    assert read(encode(good)) == [good]
    with pytest.raises(ProtocolError, match=f"field '{field}' is not a list of ranges of ranks"):
        read(encode({**good, field: [[0, 1], item]}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"address": "desk.local"}, "is no address"), ({"address": "@name\0x"}, "is no address"),
        ({"address": "@" + "x" * 200}, "is no address"), ({"address": "@\ud800"}, "is no address"),
        ({"port": -1}, "-1 is no port"), ({"port": 65536}, "65536 is no port"),
        ({"port": 2**40}, "'port' is out of range"), ({"port": True}, "'port' is missing or not int"),
    ],
    ids=str,
)
def test_addresses_are_numbers_and_sockets_of_this_host(change, words):
    local = {**ADDRESS, "address": "@ringcomm-1", "port": 0}
    assert validate({**GOOD[0], "addresses": [local]})
    with pytest.raises(ProtocolError, match=words):
        validate({**GOOD[0], "addresses": [{**ADDRESS, **change}]})
    with pytest.raises(ProtocolError, match=words):
        validate({"type": "measure", "pairs": [{"rank": 1, "wires": [{**ADDRESS, **change}]}]})


REPEAT = {"type": "repeat", "epoch": 2, "number": 7, "set": 1, "count": 0, "bytes": 5}


@pytest.mark.parametrize("piece", [1, 7, 100])
def test_a_repeat_comes_with_its_elements_among_other_messages(piece):
    sending, receiving = session_of(b"key", True), session_of(b"key", False)
    stream = encode({"type": "bye"}, sending) + repeat_framed(REPEAT, sending) + b"abcde"
    stream += encode({"type": "bye"}, sending)
    reader = MessageReader(1000, receiving, repeats=True)
    found = [item for at in range(0, len(stream), piece) for item in reader.feed(stream[at : at + piece])]
    assert found == [{"type": "bye"}, {**REPEAT, "payload": bytearray(b"abcde")}, {"type": "bye"}]


def test_a_repeat_is_refused_where_there_are_none_and_if_it_is_long_or_altered():
    with pytest.raises(ProtocolError, match="bytes; at most"):
        list(MessageReader(1000).feed(repeat_framed(REPEAT, None)))
    with pytest.raises(ProtocolError, match="a repeat of 9999999 bytes"):
        list(MessageReader(1000, None, repeats=True).feed(repeat_framed({**REPEAT, "bytes": 9999999}, None)))
    session, stream = session_of(b"key", False), bytearray(repeat_framed(REPEAT, session_of(b"key", True)))
    stream[10] ^= 1
    with pytest.raises(ProtocolError, match="tag"):
        list(MessageReader(1000, session, repeats=True).feed(bytes(stream)))


def test_the_page_on_the_protocol_has_every_message_with_its_fields():
    page = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text()
    names = {name for kind, fields in _FIELDS.items() for name in (kind, *fields)}
    assert sorted(name for name in names if f"`{name}`" not in page) == []
