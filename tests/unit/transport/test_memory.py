"""Links inside one process: what fits, ends, and waits."""

from __future__ import annotations

from ringcomm.transport.memory import memory_channels


def test_the_channels_of_a_job_are_apart():
    one, other = memory_channels(2)
    one.direct.link(1).send([memoryview(b"x")])
    assert [fabric.link(0).readable() for fabric in other] == [True, False, False]
    assert {fabric.size for fabric in (*one, *other)} == {2}
