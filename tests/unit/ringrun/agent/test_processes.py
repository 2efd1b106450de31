"""Bytes for children, through a descriptor."""

from __future__ import annotations

import os

import pytest

from ringrun.agent.processes import InheritedBytes


@pytest.mark.parametrize(("length", "in_memory"), [(0, True), (200_000, True), (0, False), (4096, False)])
def test_every_child_reads_all_from_the_start(
    length: int, in_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not in_memory:
        monkeypatch.delattr(os, "memfd_create")
    data = os.urandom(length)
    inherited = InheritedBytes(data)
    for _ in range(2):
        with open(inherited.descriptor(), "rb") as file:
            assert file.read() == data
