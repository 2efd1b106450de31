"""Which gradients are compressed how, residuals by name, and the automatic choice."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest

import ringcomm as rc
from ringcomm._adapter import compression as module
from ringcomm._adapter.compression import (
    AGAIN,
    STEPS,
    AutoCompression,
    Compression,
    Links,
    Residuals,
    StepTime,
    choose,
    choose_again,
    codec_for,
    compressor_of,
    configured,
    exposed_s,
    fitted,
    is_elementwise,
    send_s,
)  # fmt: skip
from ringcomm.calls.process_set import global_process_set
from ringcomm.codec.codecs import make_codec
from ringcomm.collective.measure import Rates, code_s
from ringcomm.config import Membership
from ringcomm.configuration.settings import COMPRESSIONS
from ringcomm.docstrings import SHARED
from ringcomm.errors import ConfigError
from ringcomm.ops import CODECS


@pytest.mark.parametrize("compression, dtype, shape, expected", [
    (Compression.none, "float32", (100, 100), "none"),
    (Compression.bf16, "float32", (100, 100), "none"),  # converted before, as one tensor
    (Compression.int8, "float32", (100, 100), "int8"),
    (Compression.int8, "float64", (8, 3, 20, 20), "int8"),
    (Compression.int8, "float32", (10000,), "bf16"),
    (Compression.int8, "float32", (10, 10), "bf16"),
    (Compression.int8, "int64", (100, 100), "none"),
    (Compression.int8, "float16", (100, 100), "none"),
    (Compression.int4, "float32", (64, 64), "int4"),
])  # fmt: skip
def test_what_is_compressed_how(compression, dtype, shape, expected):
    assert codec_for(compression, dtype, shape) == expected


def test_names():
    assert compressor_of("int8") is Compression.int8
    assert compressor_of(Compression.bf16) is Compression.bf16
    with pytest.raises(ConfigError, match="'int7': there are 'none', 'fp16'"):
        compressor_of("int7")
    assert is_elementwise(Compression.int4) and not is_elementwise(object())


class TestResiduals:
    def test_buckets_that_are_made_anew_keep_what_belongs_to_a_name(self):
        residuals = Residuals()
        whole = residuals.side_by_side(["a", "b"], [3, 2], [0, 4], 8)
        whole[:3], whole[4:6] = 1, 2
        assert residuals.of("a", 3).tolist() == [1, 1, 1]
        again = residuals.side_by_side(["b", "c"], [2, 1], [0, 2], 3)
        assert again.tolist() == [2, 2, 0]
        again[:] = 5
        assert residuals.of("b", 2).tolist() == [5, 5] and residuals.of("a", 3).tolist() == [1, 1, 1]

    def test_saving_and_loading(self):
        residuals, other = Residuals(), Residuals()
        residuals.of("a", 2)[:] = 3
        mine = other.of("a", 2)
        other.of("b", 1)[:] = 9
        other.load(residuals.state())
        assert mine.tolist() == [3, 3] and other.of("b", 1).tolist() == [0]
        fresh = Residuals()
        fresh.load(residuals.state())
        assert fresh.of("a", 2).tolist() == [3, 3]
        residuals.of("a", 2)[:] = 4
        assert fresh.of("a", 2).tolist() == [3, 3], "a checkpoint must be a copy"

    def test_scaling_and_forgetting(self):
        residuals = Residuals()
        residuals.of("a", 2)[:] = 3
        residuals.of("b", 1)[:] = 4
        residuals.scale(0.5)
        found = {name: array.tolist() for name, array in residuals.state().items()}
        assert found == {"a": [1.5, 1.5], "b": [2]}
        residuals.drop(["a", "never there"])
        residuals.reset("of a test")
        assert list(residuals.state()) == ["b"] and residuals.of("b", 1).tolist() == [0]


def test_decompression_restores_the_dtype():
    numbers = np.array([0.5, 1.25], np.float64)
    small, context = Compression.fp16.compress(numbers)
    assert small.dtype == np.float16
    whole = Compression.fp16.decompress(small, context)
    assert whole.dtype == np.float64 and whole.tolist() == [0.5, 1.25]
    counts = np.array([1, 2])
    for compression in (Compression.none, Compression.fp16, Compression.bf16):
        assert is_elementwise(compression)
        assert compression.compress(counts) == (counts, None)
        assert compression.decompress(counts, None) is counts
    assert not is_elementwise(type("Own", (Compression.fp16,), {}))

# ---- compression="auto" ------------------------------------------------------------------------------------


RESNET = 102_000_000
FAST = {"bf16": Rates(0.15e-9, 0.1e-9), "int8": Rates(0.4e-9, 0.25e-9)}


def links(mbit, size=3):
    return Links(size, 1, 8e-6 / mbit, 1e-4)


def seen(name, mbit, backward_s, rates=FAST):
    """What is measured with a compression."""
    needed, coding = send_s(name, RESNET, links(mbit)), code_s(RESNET, 3, rates.get(name))
    wait_s = max(0.0, needed - backward_s)
    return StepTime(backward_s + coding + wait_s, wait_s, backward_s)


@pytest.mark.parametrize("name, before, now, backward_s, expected", [
    ("none", 10_000, 100, 0.1, "int8"), ("int8", 100, 10_000, 0.01, "bf16"), ("int8", 1000, 100, 0.1, None),
    ("none", 10_000, 9000, 0.1, None), ("int8", 100, 110, 0.1, None), ("bf16", 1000, 100, 0.2, "int8"),
    ("none", 10_000, 5000, 5.0, None),
])  # fmt: skip
def test_links_that_have_changed(name, before, now, backward_s, expected):
    found, choice = choose_again(name, RESNET, seen(name, now, backward_s), links(before), FAST)
    assert (None if choice is None else choice.name) == expected
    if expected is not None:
        assert found.byte_s == pytest.approx(links(now).byte_s, rel=0.3)
        assert choice.steps_s[name] == pytest.approx(seen(name, now, backward_s).period_s, rel=0.15)


def arrivals(backward_s, parts=13):
    """ResNet-50's buckets, which become ready one after the other during the backward pass."""
    return tuple((backward_s * place / parts, RESNET / parts) for place in range(parts))


@pytest.mark.parametrize("error", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("backward_s", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("mbit", [10_000, 1000, 100, 10])
def test_over_the_grid_the_choice_is_near_the_best_although_the_calibration_is_wrong(mbit, backward_s, error):
    """What each compression takes on the true links, and what is chosen with wrongly measured ones."""
    true, overlap_s = links(mbit), backward_s * 12 / 13

    def took(name):
        waits = StepTime(0.0, 0.0, overlap_s, arrivals(backward_s))
        return backward_s + code_s(RESNET, 3, FAST.get(name)) + exposed_s(name, RESNET, waits, true)

    steps_s = {name: took(name) for name in ("none", "bf16", "int8")}
    seen = StepTime(steps_s["none"], steps_s["none"] - backward_s, overlap_s, arrivals(backward_s))
    calibrated = true._replace(byte_s=true.byte_s * error)
    choice = choose(RESNET, seen, fitted("none", RESNET, seen, calibrated, 2.0), FAST)
    assert steps_s[choice.name] <= 1.03 * steps_s["none"]
    assert steps_s[choice.name] <= 1.10 * min(steps_s.values())
    assert choice.steps_s[choice.name] == pytest.approx(steps_s[choice.name], rel=0.15)


class Program:
    """An optimizer of a program whose time is made up: rank 0 of 3, in a job of this process alone."""

    def __init__(self, monkeypatch):
        self.now_s = 100.0
        self.calibrated_mbit = 100
        self.auto = AutoCompression(global_process_set)
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now_s))
        monkeypatch.setattr(module, "measured_rates", lambda: FAST)
        monkeypatch.setattr(module, "links_of", lambda model, size: links(self.calibrated_mbit))

    def steps(self, count, mbit, backward_s):
        """Make steps over links of this speed; whether the compressor has changed, for each."""
        found = []
        for _ in range(count):
            kind = self.auto.current().kind
            needed = send_s(kind, RESNET, links(mbit))
            self.now_s += code_s(RESNET, 3, FAST.get(kind))
            self.auto.submitting(RESNET)
            self.now_s += backward_s
            waited_from_s = self.now_s
            self.now_s += max(0.0, needed - backward_s)
            found.append(self.auto.finished(RESNET, waited_from_s))
        return found


class TestAutoCompression:
    @pytest.fixture
    def program(self, alone, monkeypatch):
        return Program(monkeypatch)

    def test_it_chooses_after_some_steps(self, program, caplog):
        with caplog.at_level(logging.WARNING):
            assert program.steps(STEPS + 1, 100, 1.0) == [False] * STEPS + [True]
        assert program.auto.chosen is Compression.int8
        (record,) = caplog.records
        assert record.getMessage().startswith("compression=auto chooses int8: step 10.9 s -> ")

    def test_without_a_gain_it_stays_as_it_is(self, program):
        program.calibrated_mbit = 10_000
        assert program.steps(STEPS + 1, 10_000, 5.0) == [False] * (STEPS + 1)
        assert program.auto.chosen is Compression.none and program.auto.choice.name == "none"

    def test_it_may_only_advise(self, program, caplog):
        program.auto, program.calibrated_mbit = AutoCompression(global_process_set, advises=True), 20
        with caplog.at_level(logging.WARNING):
            assert program.steps(3 * STEPS, 20, 1.0) == [False] * 3 * STEPS
        assert program.auto.chosen is Compression.none
        (record,) = caplog.records
        assert "ranks wait for 53 s in each step" in record.getMessage()
        assert "--compress auto they would choose int8: step 54" in record.getMessage()
        assert "down to 1 s per step" in record.getMessage()

    def test_it_looks_at_the_links_again(self, program, caplog):
        program.steps(STEPS + 1, 100, 0.01)
        with caplog.at_level(logging.WARNING):
            assert program.steps(AGAIN, 100, 0.01) == [False] * AGAIN, "nothing has changed"
            assert program.steps(AGAIN, 10_000, 0.01) == [False] * (AGAIN - 1) + [True]
            assert program.auto.chosen is Compression.bf16
            assert program.steps(AGAIN, 100, 0.01) == [False] * (AGAIN - 1) + [True]
        assert program.auto.chosen is Compression.int8
        texts = [record.getMessage() for record in caplog.records[-2:]]
        assert [text.split(", and it")[0] for text in texts] == [
            "compression=auto: links are faster now", "compression=auto: links are slower now",
        ]  # fmt: skip


def test_the_setting_counts_where_a_program_passes_nothing(monkeypatch):
    monkeypatch.setenv("RINGCOMM_COMPRESSION", "bf16")
    rc.init(Membership())
    try:
        assert configured(Compression.none, global_process_set) is Compression.bf16
        assert configured("int8", global_process_set) is Compression.int8
    finally:
        rc.shutdown()


@pytest.mark.parametrize("name", CODECS)
def test_every_codec_can_be_chosen(name):
    assert getattr(Compression, name).kind == name == compressor_of(name).kind
    assert f'``"{name}"``' in SHARED["compression"] and name in COMPRESSIONS
    if name != "none":
        assert make_codec(name).name == name
