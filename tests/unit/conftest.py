"""`clock`: a clock that a test moves."""

from __future__ import annotations

import pytest


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()
