"""How long a rank waits for the slower addresses of hosts that it has reached."""

from __future__ import annotations

import pytest

from ringcomm.rendezvous.probing import grace_s


@pytest.mark.parametrize(("answered_s", "wait_s"), [(0.0, 0.3), (0.02, 0.3), (0.5, 1.5), (1.0, 3.0)])
def test_busy_hosts_get_more_time(answered_s: float, wait_s: float) -> None:
    assert grace_s(answered_s) == wait_s


@pytest.mark.parametrize(("answered_s", "wait_s"), [(0.0, 0.03), (0.02, 0.06), (0.5, 1.5)])
def test_the_lower_limit_may_be_another(answered_s: float, wait_s: float) -> None:
    assert grace_s(answered_s, 0.03) == wait_s
