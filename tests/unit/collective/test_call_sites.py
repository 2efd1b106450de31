"""Places in programs: where they are found, what they are called, and which are the same."""

from __future__ import annotations

import sys
import zlib

import pytest

from ringcomm.collective import call_sites
from ringcomm.collective.call_sites import (
    CallSites,
    call_site,
    find_site,
    nowhere,
    number_of_known,
    number_text,
    site_number,
    site_text,
    this_site,
)


def place():
    return this_site()


def test_a_place_is_the_innermost_line_outside_of_ringcomm():
    assert site_text(place()) == f"{__file__}:{place.__code__.co_firstlineno + 1}"
    assert call_site().startswith(f"{__file__}:")


def test_it_is_found_where_it_was_the_last_time():
    known = nowhere()

    def inside():
        return find_site(1, known)

    first = [inside() for _ in range(2)]
    assert first[0][0] is first[1][0] is inside.__code__ and known[1] is inside.__code__

    def deeper():
        return inside()

    assert deeper()[0] is inside.__code__
    known[0] = 10_000  # the stack is not that deep any more
    assert inside()[0] is inside.__code__ and known[0] < 10_000


def test_in_code_that_belongs_to_ringcomm_alone_it_is_the_outermost(monkeypatch):
    monkeypatch.setattr(call_sites, "_ours", {})
    monkeypatch.setattr(call_sites, "is_ours", lambda filename: True)
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    assert this_site()[0] is frame.f_code


def test_numbers_are_the_same_everywhere_and_not_kept_for_ever(monkeypatch):
    site = place()
    number = site_number(site)
    assert number >> 32 == zlib.crc32(b"test_call_sites.py")
    assert number & 0xFFFFFFFF == place.__code__.co_firstlineno + 1
    assert number_text(number) == f"test_call_sites.py:{place.__code__.co_firstlineno + 1}"
    known = nowhere()
    assert number_of_known(site, known) == number and known[1:] == [*site, number]
    monkeypatch.setattr(call_sites, "_MAX_NUMBERS", 2)
    monkeypatch.setattr(call_sites, "_numbers", {})
    for instruction in range(0, 10, 2):
        site_number((place.__code__, instruction))
        assert len(call_sites._numbers) <= 2
    assert site_number(site) == number


class TestDifferences:
    def test_the_same_line_in_other_folders_is_the_same(self):
        sites = CallSites(pytest.fail)
        places = {0: "/home/a/train.py:3", 1: "/home/b/train.py:3", 2: ""}
        sites.differ(1, Described(), "The operation 'x'", places)
        assert sites.differences == []

    def test_other_lines_are_a_warning(self):
        told = []
        places = {0: "/home/a/train.py:3", 1: "/home/a/train.py:4"}
        sites = CallSites(told.append)
        for number in (1, 2):
            sites.differ(number, Described(), "The operation 'x'", places)
        assert len(told) == len(sites.differences) == 1
        assert told[0].startswith("The operation 'x', allreduce(), comes from different lines")


class Described:
    def describe(self) -> str:
        return "allreduce()"
