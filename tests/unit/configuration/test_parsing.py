"""Settings as text: the values, and what is said of texts that have none."""

from __future__ import annotations

import math

import pytest

from ringcomm.configuration import parsing

VALUES = [
    (parsing.positive_seconds, "0.5", 0.5), (parsing.positive_seconds, "inf", math.inf),
    (parsing.size, "262144", 262144), (parsing.size, "256K", 1 << 18), (parsing.size, " 256KiB ", 1 << 18),
    (parsing.size, "1mb", 1 << 20), (parsing.size, "2G", 2 << 30), (parsing.size, "7B", 7),
    (parsing.size_or_zero, " 0 ", 0), (parsing.size_or_zero, "1k", 1024),
    (parsing.seconds, "0", 0.0),
    (parsing.flag, " Yes ", True), (parsing.flag, "on", True), (parsing.flag, "", False),
    (parsing.flag, "OFF", False), (parsing.threads, " Auto ", "auto"), (parsing.threads, "none", "none"),
    (parsing.threads, "4", "4"), (parsing.transport, "shm", "shm"),
    (parsing.compression, "", ""), (parsing.compression, "int8", "int8"),
]  # fmt: skip

NONE = [
    (parsing.positive_seconds, ("0", "-1", "nan", "soon"), "must be (more than zero seconds|a number)"),
    (parsing.size, ("", "0", "-1", "K", "1.5M", "1T", "²", "1KiBB"), "number of bytes like 65536, 64K or 1M"),
    (parsing.size_or_zero, ("", "-1", "0K"), "1M, or 0"),
    (parsing.seconds, ("-1", "inf", "nan"), "zero or more seconds"),
    (parsing.flag, ("2", "maybe"), "must be 1 or 0"),
    (parsing.threads, ("0", "-1", "all", "", "²"), "must be auto, none, or a whole number"),
    (parsing.transport, ("", "udp"), "must be one of auto, memory, shm, unix, tcp"),
    (parsing.compression, ("zip",), "must be empty or one of none, fp16"),
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
