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
        ("a:", ["'a:'", "number of slots"]),
        ("a:0", ["'0'", "whole number from 1"]),
        ("a:-1", ["'-1'"]),
        ("a:1@0", ["'0' is not a port"]),
        ("a:1@99999", ["'99999' is not a port"]),
        ("a:²", ["number of slots"]),
        ("a:b", ["'b'"]),
        ("a:99999", ["99999"]),
        ("fe80::1", ["brackets"]),
        ("[fe80::1", ["not closed"]),
        ("[fe80::1]2", ["'2' after the bracket"]),
        ("[jetson1]:2", ["not an IPv6 address"]),
        (":2", ["host name is missing"]),
        ("@a", ["not a user name"]),
        ("-oProxyCommand=x", ["not a host name"]),
        ("-x@a", ["not a user name"]),
        ("a b", ["not a host name"]),
        ("a;rm", ["not a host name"]),
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
        ("a slots=2 slots=3", ["line 1", "slots= is given twice"]),
        ("a:2 slots=3", ["slots are given twice"]),
        ("a\n\nb max=3", ["line 3", "'max=3' is not an option", "python=…"]),
        ("a 2", ["'2' is not an option"]),
        ("a cwd=", ["no value"]),
        ("a cwd='x", ["line 1", "quote"]),
        ("a b", ["'b'"]),
        ("a::1", ["line 1", "brackets"]),
        ("a max-slots=2 max_slots=3", ["max_slots= is given twice"]),
        ("a max_slots=none", ["line 1", "'none'"]),
        ("a\nb slots=3 max-slots=2", ["line 2", "max_slots=2 is less than slots=3"]),
    ],
)
def test_bad_hostfiles_are_named(text: str, words: List[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_hostfile(text, "hosts")
    for word in words:
        assert word in str(caught.value)


def test_the_destination_of_ssh() -> None:
    assert HostSpec("jetson1").target == "jetson1"
    assert HostSpec("jetson1", "me").target == "me@jetson1"


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
        ("[]", ["h.json", "names no host", '"ssh"']),
        ('{"hosts": {}}', ["h.json", "names no host"]),
        ('[{"ssh": "a"},', ["h.json", "begins like JSON", "line 1"]),
        ('{"hosts": [{"ssh": "a"}], "envs": ["A=1", "B=2"]}', ["h.json", "-x A=1 -x B=2"]),
        ('[{"ssh": "a"}, {"name": "b"}]', ["h.json, host 2", '"ssh"']),
        ('[{"ssh": "a", "ips": "10.0.0.1"}]', ["h.json, host 1", '"ips"']),
        ('[{"ssh": "a b"}]', ["h.json, host 1", "a b"]),
    ],
)
def test_bad_hostfiles_of_mlx_launch_are_named(text: str, words: List[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse_hostfile(text, "h.json")
    assert all(word in str(error.value) for word in words), error.value
