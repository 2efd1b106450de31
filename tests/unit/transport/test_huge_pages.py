"""What comes again is moved to huge pages, once; what it holds stays the same."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import numpy as np
import pytest

from ringcomm.transport import huge_pages
from ringcomm.transport.huge_pages import HUGE_BYTES, USES, HugePages


def huge_kib(address):
    """How much of the mapping that begins here, or around here, lies on huge pages, in KiB."""
    found = 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        span = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if span:
            inside = int(span[1], 16) <= address < int(span[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            found += int(line.split()[1])
    return found


@pytest.fixture
def buffer():
    """8 MiB of small pages, all of them touched."""
    memory = mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    data = np.frombuffer(memory, np.uint32)
    data[:] = np.arange(data.size)
    return data


def test_what_comes_for_the_third_time_is_moved(buffer):
    known = HugePages()
    if known._madvise is None:
        pytest.skip("this system has no huge pages, or forbids them")
    address = buffer.ctypes.data
    before = huge_kib(address)
    for _ in range(USES - 1):
        known.use(address, buffer.nbytes)
    assert known.moved_bytes == 0 and huge_kib(address) == before
    known.use(address, buffer.nbytes)
    if known.moved_bytes == 0:
        pytest.skip("this system cannot move memory to huge pages (Linux 6.1 can), or has none left")
    assert known.moved_bytes >= buffer.nbytes - 2 * HUGE_BYTES
    assert huge_kib(address) >= before + known.moved_bytes // 1024
    assert (buffer == np.arange(buffer.size)).all()


def test_each_buffer_is_moved_once_and_only_whole_pages_of_it(monkeypatch):
    known, asked = HugePages(), []
    monkeypatch.setattr(known, "_madvise", lambda *what: asked.append(what) or 0)
    for _ in range(2 * USES):
        known.use(HUGE_BYTES + 64, 3 * HUGE_BYTES)
        known.use(64, HUGE_BYTES)  # no whole page
    assert asked == [(2 * HUGE_BYTES, 2 * HUGE_BYTES, 25)]
    assert known.moved_bytes == 2 * HUGE_BYTES


@pytest.mark.parametrize("policy", ["always madvise [never]\n", None])
def test_where_huge_pages_are_forbidden_nothing_is_asked(monkeypatch, tmp_path, policy):
    file = tmp_path / "enabled"
    if policy is not None:
        file.write_text(policy)
    monkeypatch.setattr(huge_pages, "_POLICY", file)
    known = HugePages()
    assert known._madvise is None
    for _ in range(USES):
        known.use(0, 1 << 30)
    assert known.moved_bytes == 0
