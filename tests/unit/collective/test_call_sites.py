"""Places in programs: where they are found."""

from __future__ import annotations

import sys

from ringcomm.collective import call_sites
from ringcomm.collective.call_sites import call_site, find_site, nowhere, site_text, this_site


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
