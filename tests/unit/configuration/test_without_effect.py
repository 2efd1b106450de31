"""Settings that no optimizer has followed."""

from __future__ import annotations

from typing import Any, Dict, List

import pytest

from ringcomm.config import Settings
from ringcomm.configuration import without_effect


@pytest.mark.parametrize(
    ("given", "used", "topics"),
    [
        ({}, [], []),
        ({"compression": "none"}, [], []),
        ({"compression": "int8"}, [], ["no compression"]),
        ({"compression": "int8", "local_steps": "auto"}, [], ["no compression", "no local steps"]),
        ({"compression": "int8", "local_steps": "auto"}, ["compression"], ["no local steps"]),
        ({"local_steps": "8"}, ["local_steps"], []),
    ],
)
def test_what_is_said_at_the_end(
    monkeypatch: pytest.MonkeyPatch, given: Dict[str, Any], used: List[str], topics: List[str]
) -> None:
    monkeypatch.setattr(without_effect, "_used", set())
    for name in used:
        without_effect.use(name)
    found = without_effect.without_effect(Settings(**given))
    assert [topic for topic, _ in found] == topics
    assert all("had no effect" in text for _, text in found)
