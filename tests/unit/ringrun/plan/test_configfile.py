from __future__ import annotations

import pytest

from ringcomm.errors import ConfigError
from ringrun.plan.configfile import Line, parse_file


def test_lines_and_sections() -> None:
    content = """---
# comment
timeout: 300   # seconds
iface: "eth0 # no comment"

timeline:
  filename: 'it''s.json'
  mark_cycles: true
empty:
params:   # a comment
    fusion_threshold_mb: 32
    cycle_time_ms: ~
transport: tcp#1
url: http://x
"""
    assert parse_file(content, "f") == [
        Line("", "timeout", "300", 3),
        Line("", "iface", "eth0 # no comment", 4),
        Line("timeline", "filename", "it's.json", 7),
        Line("timeline", "mark_cycles", "true", 8),
        Line("params", "fusion_threshold_mb", "32", 11),
        Line("", "transport", "tcp#1", 13),
        Line("", "url", "http://x", 14),
    ]


@pytest.mark.parametrize("content", ["", "\n\n", "# only\n", "---\n", "a:\n", "a: null # nothing"])
def test_nothing(content: str) -> None:
    assert parse_file(content, "f") == []


@pytest.mark.parametrize(
    ("content", "number", "words"),
    [
        ("a: 1\nb", 2, "not of the form"),
        ("- a", 1, "not of the form"),
        ("\ta: 1", 1, "indented"),
        ("a:\n\tb: 1", 2, "indented"),
        ("a:1", 1, "not of the form"),
        ("a: 1\na: 2", 2, "twice"),
        ("s:\n  a: 1\n  a: 2", 3, "twice"),
        ("a: 1\n  b: 2", 2, "indented"),
        ("s:\n  a: 1\n    b: 1", 3, "indented"),
        ("a: [1, 2]", 1, "not supported"),
        ("a: {b: 1}", 1, "not supported"),
        ("a: *x", 1, "not supported"),
        ("a: |", 1, "not supported"),
        ("a: 'open", 1, "one quoted value"),
        ('a: "x\\n"', 1, "one quoted value"),
        ("a: 'x' y", 1, "one quoted value"),
        ("a: 1\n---\nb: 1", 2, "not of the form"),
        ("{}", 1, "not of the form"),
    ],
)
def test_the_rest_of_yaml_is_refused_by_its_line(content: str, number: int, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_file(content, "file.yaml")
    assert f"file.yaml, line {number}: " in str(caught.value) and words in str(caught.value)
