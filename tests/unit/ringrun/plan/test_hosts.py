from __future__ import annotations

from typing import List, Optional

import pytest

from ringcomm.errors import ConfigError
from ringrun.plan.hosts import HostSpec, crowding, parse_hostfile, parse_hosts


@pytest.mark.parametrize(
    ("text", "specs"),
    [
        ("a", [HostSpec("a")]),
        ("a,b:2", [HostSpec("a"), HostSpec("b", slots=2)]),
        (" a , b:2 ", [HostSpec("a"), HostSpec("b", slots=2)]),
        ("me@a.example-1.org:3", [HostSpec("a.example-1.org", "me", 3)]),
        ("192.168.1.7:1", [HostSpec("192.168.1.7", slots=1)]),
        ("[fe80::1]:2", [HostSpec("fe80::1", slots=2)]),
        ("[fe80::1%eth0]", [HostSpec("fe80::1%eth0")]),
        ("me@[::1]:2,[::1]", [HostSpec("::1", "me", 2), HostSpec("::1")]),
        ("DOMAIN\\me@pc", [HostSpec("pc", "DOMAIN\\me")]),
        ("me@a:2@2222,[::1]:1@22", [HostSpec("a", "me", 2, port=2222), HostSpec("::1", slots=1, port=22)]),
        ("join:2@80,join:desk", [HostSpec("join", slots=2, port=80), HostSpec("join", machine="desk")]),
        ("join:2nd-desk@80", [HostSpec("join", port=80, machine="2nd-desk")]),
    ],
)
def test_hosts(text: str, specs: List[HostSpec]) -> None:
    assert parse_hosts(text) == specs
    assert parse_hosts(",".join(spec.item for spec in specs)) == specs


@pytest.mark.parametrize(
    ("slots", "cores", "odd"),
    [(22, 4, "If 22 is the port of its sshd, write me@a:1@22"), (22, 24, ""), (33, 4, "asks for 33 ranks"),
     (32, 4, ""), (None, 1, "")],
)  # fmt: skip
def test_slots_that_are_probably_no_slots(slots: Optional[int], cores: float, odd: str) -> None:
    text = crowding(HostSpec("a", "me", slots), cores)
    assert odd in text and bool(text) is bool(odd)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["empty"]),
        ("a,,b", ["item 2 of 3", "comma too many"]),
        ("a:", ["'a:' is not a host"]),
        ("a:0", ["'0'", "whole number from 1 to 65535"]),
        ("a:1@99999", ["'99999'", "whole number from 1 to 65535"]),
        ("join:desk@99999", ["'99999'", "whole number from 1 to 65535"]),
        ("join:a.b", ["is not a host"]),
        ("a:²", ["is not a host"]),
        ("a:99999", ["99999"]),
        ("fe80::1", ["[IPV6]:SLOTS"]),
        ("[fe80::1", ["is not a host"]),
        ("[jetson1]:2", ["is not a host"]),
        (":2", ["is not a host"]),
        ("-oProxyCommand=x", ["is not a host"]),
        ("-x@a", ["is not a host"]),
        ("a b", ["is not a host"]),
    ],
)
def test_bad_hosts_are_named(text: str, words: List[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_hosts(text)
    for word in ["-H" if text else "list of hosts", *words]:
        assert word in str(caught.value)


def test_hostfile() -> None:
    text = """# my machines
    localhost slots=2   # this one

    jetson1
    me@jetson2 slots = 3 python=/opt/py/bin/python cwd="/data/my train" iface=eth0
    [fd00::2]:4
    jetson3 slots=2 max-slots=2
    jetson4 max_slots=3
    """
    assert parse_hostfile(text, "hosts") == [
        HostSpec("localhost", slots=2),
        HostSpec("jetson1"),
        HostSpec("jetson2", "me", 3, "/opt/py/bin/python", "/data/my train", "eth0"),
        HostSpec("fd00::2", slots=4),
        HostSpec("jetson3", slots=2, max_slots=2),
        HostSpec("jetson4", max_slots=3),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("# nothing\n", ["hosts names no host"]),
        ("a\nb slots=two", ["line 2", "'two'"]),
        ("a:2 slots=3", ["line 1", "'slots=3' is not an option of a host", "each once"]),
        ("a\n\nb max=3", ["line 3", "'max=3' is not an option", "python=…"]),
        ("a cwd=", ["'cwd=' is not an option"]),
        ("a cwd='x", ["line 1", "quot"]),
        ("a::1", ["line 1", "[IPV6]"]),
        ("a max-slots=2 max_slots=3", ["each once"]),
        ("a\nb slots=3 max-slots=2", ["line 2", "max_slots=2 is less than slots=3"]),
    ],
)
def test_bad_hostfiles_are_named(text: str, words: List[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_hostfile(text, "hosts")
    for word in words:
        assert word in str(caught.value)


def test_a_hostfile_of_mlx_launch() -> None:
    one = '{"ssh": "mac1", "ips": ["10.0.0.1", "fe80::1"], "rdma": []}'
    other = '{"ssh": "me@mac2"}'
    expected = [HostSpec("mac1", slots=2, iface="10.0.0.1/32,fe80::1/128"), HostSpec("mac2", "me", slots=1)]
    assert parse_hostfile(f"\n [ {one}, {one}, {other}]", "hosts.json") == expected
    whole = f'{{"backend": "ring", "envs": [], "hosts": [{one}, {one}, {other}]}}'
    assert parse_hostfile(whole, "hosts.json") == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", ["h.json is not a list of hosts", '"ssh"']),
        ('[{"ssh": "a"},', ["h.json is not a list of hosts", "line 1"]),
        ('{"hosts": [{"ssh": "a"}], "envs": ["A=1", "B=2"]}', ["h.json", "-x A=1 -x B=2"]),
        ('[{"ssh": "a"}, {"name": "b"}]', ["h.json is not", "see host 2"]),
        ('[{"ssh": "a b"}]', ["h.json, host 1", "a b"]),
    ],
)
def test_bad_hostfiles_of_mlx_launch_are_named(text: str, words: List[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse_hostfile(text, "h.json")
    assert all(word in str(error.value) for word in words), error.value
