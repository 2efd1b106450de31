from __future__ import annotations

import pytest

from ringcomm.errors import ConfigError
from ringrun.elastic.discovery import MAX_HOSTS, DiscoveredHosts, host_key, parse_discovered
from ringrun.plan.hosts import HostSpec


def test_the_order_is_that_of_the_lines() -> None:
    found = parse_discovered("b:2\n\n a \nme@c:3\n[::1]:4\nb:2\n", slots=5)
    assert found == [
        HostSpec("b", slots=2), HostSpec("a", slots=5), HostSpec("c", "me", 3), HostSpec("::1", slots=4),
    ]  # fmt: skip
    assert [host_key(spec) for spec in found] == ["b", "a", "me@c", "::1"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a\nb:0", ["line 2", "'0'"]),
        ("a b", ["line 1", "'a b'"]),
        ("a:1\nA:2", ["line 2", "2 slots", "1 in an earlier line"]),
        ("-oProxyCommand=x", ["line 1"]),
        ("$(reboot)", ["line 1"]),
        ("\n".join(f"h{number}" for number in range(MAX_HOSTS + 1)), [f"line {MAX_HOSTS + 1}", "1024"]),
    ],
)
def test_invalid_output_is_refused_with_its_line(text: str, words: list) -> None:
    with pytest.raises(ConfigError) as problem:
        parse_discovered(text)
    assert [word for word in words if word not in str(problem.value)] == []


def test_the_last_valid_result_counts_and_a_problem_is_reported_once() -> None:
    found = DiscoveredHosts(1)
    assert not found.succeeded
    assert found.succeed("a") == ([HostSpec("a", slots=1)], "")
    assert found.succeeded
    assert "exit code 3" in found.fail("exit code 3")
    assert found.fail("exit code 3") == ""
    assert "exit code 4" in found.fail("exit code 4")
    assert found.succeeded
    hosts, text = found.succeed("a\nb")
    assert [spec.name for spec in hosts] == ["a", "b"]
    assert "works again" in text
    assert found.succeed("a")[1] == ""
