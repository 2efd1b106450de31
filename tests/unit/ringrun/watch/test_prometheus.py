"""Prometheus's text format: every sample below its own type line, labels escaped."""

from __future__ import annotations

import re

from ringrun.watch.history import History
from ringrun.watch.prometheus import exposition
from tests.unit.ringrun.watch.samples import HOSTS, SLOW_2

_SERIES = re.compile(r'[a-z_]+\{(?:[a-z]+="(?:[^"\\\n]|\\["\\n])*",?)*\} [0-9.e+-]+')


def test_every_line_is_valid_and_below_its_own_type():
    name = ""
    for line in exposition(SLOW_2, HOSTS).splitlines():
        if line.startswith("# TYPE "):
            name = line.split()[2]
        elif not line.startswith("#"):
            assert _SERIES.fullmatch(line), line
            assert line.startswith(f"{name}{{")


def test_the_numbers():
    text = exposition(SLOW_2, HOSTS)
    assert 'ringcomm_steps_total{rank="1",host="jetson1"} 40\n' in text
    assert 'ringcomm_sent_bytes_total{rank="0",host="desk",peer="2"} 20000000\n' in text
    assert re.findall(r'ringcomm_slowest\{rank="(\d)",host="\w+"\} (\d)', text) == [
        ("0", "0"), ("1", "0"), ("2", "1")
    ]  # fmt: skip


def test_a_strange_host_name_breaks_no_line():
    text = exposition(SLOW_2, {0: 'a"b\\c\nd'})
    assert 'host="a\\"b\\\\c\\nd"' in text and all(map(_SERIES.fullmatch, (
        line for line in text.splitlines() if not line.startswith("#"))))  # fmt: skip


def test_before_any_report():
    assert "{" not in exposition(History(0.0), HOSTS)
