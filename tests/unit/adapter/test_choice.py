"""``compression="auto"``: predictions and the choice, from numbers alone."""

from __future__ import annotations

import pytest

from ringcomm._adapter.choice import Links, Step, choose, configured, links_of, send_s
from ringcomm._adapter.compression import PowerSGD
from ringcomm.collective.codec_rates import Rates, code_s, measured_rates
from ringcomm.errors import ConfigError
from ringcomm.process_set import global_process_set
from ringcomm.schedule.cost import CostModel

RESNET = 102_000_000
GIGABIT = 8e-9
FAST = {"bf16": Rates(0.15e-9, 0.1e-9), "int8": Rates(0.4e-9, 0.25e-9)}
SLOW = {"bf16": Rates(1.5e-9, 1e-9), "int8": Rates(4e-9, 2.5e-9)}


def links(mbit, size=3):
    return Links(size, 1, 8e-6 / mbit, 1e-4)


def step(mbit, backward_s, size=3):
    """What is measured without compression: a backward pass that hides what it can."""
    needed = send_s("none", RESNET, links(mbit, size))
    wait_s = max(0.0, needed - backward_s)
    return Step(backward_s + wait_s, wait_s, backward_s)


def test_the_volume_of_a_gradient():
    assert send_s("none", RESNET, links(1000)) == pytest.approx(4 / 3 * RESNET * GIGABIT, rel=1e-3)
    assert send_s("bf16", RESNET, links(1000)) == pytest.approx(2 / 3 * RESNET * GIGABIT, rel=1e-3)
    assert send_s("int8", RESNET, links(1000)) == pytest.approx(0.2539 * 4 / 3 * RESNET * GIGABIT, rel=1e-3)
    assert send_s("none", RESNET, Links(1, 1, GIGABIT, 0.0)) == 0.0


def test_several_ranks_per_host_send_more_with_a_codec():
    pairs = Links(4, 2, GIGABIT, 0.0)
    assert send_s("none", RESNET, pairs) == pytest.approx(RESNET * GIGABIT)
    assert send_s("int8", RESNET, pairs) == pytest.approx(2 * 0.2539 * RESNET * GIGABIT, rel=1e-3)


@pytest.mark.parametrize("mbit, backward_s, expected", [
    (10_000, 1.0, "none"), (10_000, 5.0, "none"), (1000, 5.0, "none"),
    (1000, 0.1, "int8"), (100, 0.1, "int8"), (100, 1.0, "int8"), (100, 5.0, "int8"), (10, 5.0, "int8"),
])  # fmt: skip
def test_the_choice(mbit, backward_s, expected):
    choice = choose(RESNET, step(mbit, backward_s), links(mbit), FAST)
    assert choice.name == expected
    assert choice.steps_s["none"] == pytest.approx(step(mbit, backward_s).period_s)
    if expected != "none":
        assert choice.steps_s[expected] <= 0.95 * choice.steps_s["none"]


def test_a_slow_processor_does_not_pay_for_a_fast_link():
    assert choose(RESNET, step(2500, 0.1), links(2500), SLOW).name == "none"
    assert choose(RESNET, step(100, 0.1), links(100), SLOW).name == "int8"


def test_less_than_five_percent_is_no_reason():
    barely = step(1000, 1.05)  # 1.09 s to send: 4 % are not hidden
    assert choose(RESNET, barely, links(1000), {name: Rates(0.0, 0.0) for name in FAST}).name == "none"


def test_one_line_says_what_and_why():
    choice = choose(RESNET, step(100, 1.0), links(100), FAST)
    assert choice.describe().startswith("int8: step 10.9 s -> ")
    assert choice.describe().endswith(" s predicted")
    assert "a gain of less than 5 %" in choose(RESNET, step(10_000, 5.0), links(10_000), FAST).describe()


def test_links():
    assert links_of(None, 3).byte_s < 1e-9
    assert links_of(CostModel(1e-5, 2e-10, 1e-10), 4) == Links(4, 4, 2e-10, 1e-5)
    shared = CostModel(1e-5, 2e-10, 1e-10, hosts=(0, 0, 1, 1), wire_latency_s=1e-4, wire_byte_s=(8e-9, 8e-8))
    assert links_of(shared, 4) == Links(4, 2, 8e-8, 1e-4)


def test_encoding_takes_time():
    assert code_s(1000, 2, Rates(1.0, 0.5)) == pytest.approx(1500)
    assert code_s(1000, 2, None) == 0.0


def test_rates_are_measured():
    rates = measured_rates()
    assert set(rates) == {"bf16", "int8"}
    assert all(0 < value < 1e-6 for rate in rates.values() for value in rate)


def test_powersgd_has_no_weights() -> None:
    """Its two averages are of factors, not of gradients: weights would be lost without an error."""
    with pytest.raises(ConfigError, match="balanced batches"):
        configured(PowerSGD(4), global_process_set, weighted=True)
    assert isinstance(configured(PowerSGD(4), global_process_set), PowerSGD)
