"""Waking threads that sleep on a descriptor."""

from __future__ import annotations

import select
from contextlib import closing

from ringcomm.transport.reactor import WakeUp


def is_readable(wake_up):
    return bool(select.select([wake_up], [], [], 0.0)[0])


def test_it_is_readable_from_a_wake_up_to_the_clearing():
    with closing(WakeUp()) as wake_up:
        assert not is_readable(wake_up)
        wake_up.clear()
        for _ in range(2):
            wake_up.wake()
            assert is_readable(wake_up)
            wake_up.clear()
            wake_up.clear()  # by another thread that was woken, too
            assert not is_readable(wake_up)


def test_many_wake_ups_cost_one_byte():
    with closing(WakeUp()) as wake_up:
        for _ in range(100_000):  # more than a socket's buffer holds
            wake_up.wake()
        wake_up.clear()
        assert not is_readable(wake_up)
