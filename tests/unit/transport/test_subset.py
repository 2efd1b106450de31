"""Some of the ranks of a fabric: other numbers, the same links."""

from __future__ import annotations

from typing import List

import pytest

from ringcomm.transport.base import Fabric, LinkClosed, Subset, Views
from ringcomm.transport.memory import memory_fabrics


@pytest.fixture
def fabrics() -> List[Fabric]:
    return list(memory_fabrics(4))


def views(data: bytes) -> Views:
    return [memoryview(bytearray(data))]


def test_members_are_numbered_in_their_order(fabrics: List[Fabric]):
    subset = Subset(fabrics[3], [1, 3])
    assert (subset.rank, subset.size) == (1, 2)
    assert subset.rank_of(0) == 1 and subset.link(0).peer == 0
    assert subset.link(0).carrier == fabrics[3].link(1).carrier
    assert subset.watch is fabrics[3].watch


def test_bytes_go_through_the_links_of_the_whole_fabric(fabrics: List[Fabric]):
    one, other = Subset(fabrics[1], [1, 3]), Subset(fabrics[3], [1, 3])
    assert one.link(1).send(views(b"from 1")) == 6
    assert one.link(1).settled()
    got = views(b"      ")
    other.wait([other.link(0)], [], 1.0)
    assert other.link(0).recv(got) == 6 and bytes(got[0]) == b"from 1"
    assert fabrics[3].link(1).recv(views(b" ")) == 0


def test_closing_it_leaves_the_links_open_and_closing_a_link_does_not(fabrics: List[Fabric]):
    subset = Subset(fabrics[0], [0, 2])
    subset.close()
    assert fabrics[0].link(2).send(views(b"x")) == 1
    subset.link(1).close()
    with pytest.raises(LinkClosed):
        fabrics[0].link(2).send(views(b"x"))
