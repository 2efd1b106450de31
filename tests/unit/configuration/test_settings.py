"""Settings as text: the values, texts that have none, and settings that no part of a program has followed."""

from __future__ import annotations

import math
import os

import pytest

from ringcomm.config import Settings
from ringcomm.configuration import settings

VALUES = [
    (settings.parse_positive_seconds, "0.5", 0.5), (settings.parse_positive_seconds, "inf", math.inf),
    (settings.parse_size, " 256KiB ", 1 << 18), (settings.parse_size, "1mb", 1 << 20),
    (settings.parse_size, "2G", 2 << 30), (settings.parse_size, "7B", 7),
    (settings.parse_size_or_zero, " 0 ", 0), (settings.parse_size_or_zero, "1k", 1024),
    (settings.parse_seconds, "0", 0.0), (settings.parse_flag, " Yes ", True),
    (settings.parse_flag, "", False),
    (settings.parse_threads, " Auto ", "auto"), (settings.parse_threads, "4", "4"),
    (settings.parse_transport, "shm", "shm"), (settings.parse_compression, "", ""),
]  # fmt: skip

NONE = [
    (settings.parse_positive_seconds, ("0", "-1", "nan", "soon"), "must be (more than zero|a number)"),
    (settings.parse_size, ("", "0", "-1", "K", "1.5M", "1T", "²", "1KiBB"), "number of bytes like 65536"),
    (settings.parse_size_or_zero, ("", "-1", "0K"), "1M, or 0"),
    (settings.parse_seconds, ("-1", "inf", "nan"), "zero or more seconds"),
    (settings.parse_flag, ("2", "maybe"), "must be 1 or 0"),
    (settings.parse_threads, ("0", "-1", "all", "", "²"), "must be auto, none, or a whole number"),
    (settings.parse_transport, ("", "udp"), "must be one of auto, memory, shm, unix, tcp"),
    (settings.parse_compression, ("zip",), "must be empty or one of none, fp16"),
]


@pytest.mark.parametrize(("parse", "text", "value"), VALUES)
def test_the_value_of_a_text(parse, text, value):
    found = parse(text)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(("parse", "texts", "words"), NONE)
def test_texts_without_a_value(parse, texts, words):
    for text in texts:
        with pytest.raises(ValueError, match=words):
            parse(text)


@pytest.mark.parametrize(
    ("given", "used", "topics"),
    [
        ({"compression": "none"}, [], []),
        ({"compression": "int8", "local_steps": "auto"}, [], ["no compression", "no local steps"]),
        ({"compression": "int8", "local_steps": "auto"}, ["compression"], ["no local steps"]),
        ({"local_steps": "8"}, ["local_steps"], []),
    ],
)
def test_settings_without_effect(monkeypatch, given, used, topics):
    monkeypatch.setattr(settings, "_used", set())
    for name in used:
        settings.use(name)
    assert [topic for topic, _ in settings.without_effect(Settings(**given))] == topics


def test_ranks_poll_for_longer_where_they_outnumber_the_cores_of_this_process(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 5, 6}, raising=False)
    spin_s = [settings.polling_s(Settings(spin_us=20.0), ranks) for ranks in (3, 4)]
    assert spin_s == pytest.approx([20e-6, 100e-6])
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert settings.polling_s(Settings(spin_us=20.0), 8) == pytest.approx(20e-6)
