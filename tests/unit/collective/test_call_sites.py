"""Places in programs: where they are found."""

from __future__ import annotations

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
