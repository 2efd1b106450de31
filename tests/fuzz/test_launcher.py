"""What the launcher reads: from agents, from the command line and from files."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

from ringcomm.configuration.endpoints import parse_endpoint
from ringcomm.errors import ConfigError, ProtocolError
from ringcomm.storage.keys import read_key
from ringcomm.transport.encryption import encryption_of
from ringrun.agent import framing
from ringrun.plan.hosts import parse_hostfile, parse_hosts
from ringrun.reach.incoming import event_facts
from ringrun.reach.protocol import FRAME_LIMIT_BYTES, FrameReader
from tests.fuzz.cases import at_most, damaged, fuzz, pieces, values

events = st.fixed_dictionaries({"event": st.sampled_from(["ready", "exit", "started", "what"])}) | values
frames = st.builds(
    lambda kind, rank, data: framing.TO_LAUNCHER.pack(kind, rank, len(data)) + data,
    st.integers(0, 5), st.integers(-2, 3), st.binary(max_size=30),
)  # fmt: skip


@fuzz(st.binary(max_size=30), damaged(st.lists(frames, max_size=4).map(b"".join)), pieces)
def test_what_an_agent_says(noise, data, sizes):
    reader = FrameReader()
    data = noise + framing.MARKER + data
    with at_most(64 * 1024):
        try:
            position = 0
            for size in itertools.cycle(sizes):
                for frame in reader.feed(data[position : position + size]):
                    assert len(frame.data) <= FRAME_LIMIT_BYTES
                    if frame.kind == framing.EVENT:
                        event_facts(frame.data)
                position += size
                if position >= len(data):
                    break
        except ProtocolError:
            pass


word = st.text(max_size=12) | st.sampled_from(
    [
        "host",
        ":",
        "=",
        "slots=2",
        "[",
        "]",
        "@",
        "#",
        ",",
        "'",
        "9" * 5000,
        "fe80::1%eth0",
        "\n",
        "python=",
        " ",
    ]
)
text = st.lists(word, max_size=8).map("".join)


@fuzz(text)
def test_hosts_and_endpoints(said):
    for parse in (parse_hosts, lambda text: parse_hostfile(text, "hosts"), parse_endpoint):
        try:
            parse(said)
        except ConfigError as problem:
            assert str(problem)


pem = st.sampled_from(
    ["-----BEGIN CERTIFICATE-----\n", "-----END CERTIFICATE-----\n", "MIIB", "\n", "ab" * 16, "="]
)


@fuzz(st.lists(pem | st.text(max_size=10), max_size=8).map("".join))
def test_keys(said):
    try:
        _, certificate = read_key(None, "", said or "x")
        encryption_of(certificate)
    except ConfigError as problem:
        assert str(problem)
