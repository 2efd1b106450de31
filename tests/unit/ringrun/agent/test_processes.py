"""Bytes for children, through a descriptor."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, List

import pytest

from ringrun.agent.processes import InheritedBytes

LENGTHS = [0, 1, 4096, 4097, 200_000]


def read_all(descriptor: int) -> bytes:
    with open(descriptor, "rb") as file:
        return file.read()


@pytest.mark.parametrize("length", LENGTHS)
def test_every_child_reads_all_from_the_start(length: int) -> None:
    data = os.urandom(length)
    inherited = InheritedBytes(data, None)
    assert [read_all(inherited.descriptor()) for _ in range(2)] == [data] * 2


@pytest.mark.parametrize("length", [0, 1, 4096])
def test_where_there_is_no_memory_without_a_name_a_pipe_holds_them(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    data = os.urandom(length)
    inherited = InheritedBytes(data, None)
    assert inherited.fd < 0
    assert [read_all(inherited.descriptor()) for _ in range(2)] == [data] * 2


def test_the_c_library_may_have_it_where_python_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    create: Any = os.memfd_create
    asked: List[Any] = []

    def of_the_library(name: bytes, flags: int) -> int:
        asked.append((name, flags))
        descriptor: int = create("test")
        return descriptor

    monkeypatch.delattr(os, "memfd_create")
    inherited = InheritedBytes(b"key", SimpleNamespace(memfd_create=of_the_library))
    assert read_all(inherited.descriptor()) == b"key"
    assert asked == [(b"ringrun", 1)], "closed in programs that a child starts"
