"""An engine's channels to its peers, driven by hand: what interrupts it, heartbeats, and what it is doing."""

from __future__ import annotations

import pytest

from ringcomm.collective.observe import Progress
from ringcomm.engine.failure_detector import SilenceLimits
from ringcomm.engine.peer_channels import PeerChannels
from ringcomm.errors import PeerStalledError
from ringcomm.transport.base import Stopped
from ringcomm.transport.memory import memory_fabrics

HOSTS = ["desk", "jetson1", "jetson2"]


class Job:
    """The channels of all ranks, over memory and a clock that is a number."""

    def __init__(self, limits: SilenceLimits) -> None:
        self.now_s = 0.0
        self.doing = [(Progress(), Progress()) for _ in HOSTS]
        self.fabrics = memory_fabrics(len(HOSTS))
        self.peers = [
            PeerChannels(fabric, HOSTS, limits, self._lost, self._progress(rank), lambda: self.now_s)
            for rank, fabric in enumerate(self.fabrics)
        ]

    def _progress(self, rank: int):
        return lambda: self.doing[rank]

    def _lost(self, peer: int, why: str, kind: str) -> BaseException:
        return PeerStalledError(f"{kind}: {why}", rank=peer)

    def run(self, until_s: float, ranks=(0, 1, 2)) -> None:
        """These ranks go on; the others are frozen."""
        while self.now_s < until_s:
            self.now_s += 0.1
            for rank in ranks:
                self.peers[rank].awake()
                self.peers[rank].pulse()


class TestHeartbeats:
    def test_one_that_is_frozen_is(self):
        job = Job(SilenceLimits(3.0, 0.0, 0.0))
        job.run(1.0)
        with pytest.raises(PeerStalledError, match="^silent: no heartbeat for 3 s") as caught:
            job.run(10.0, ranks=(0, 1))
        assert caught.value.rank == 2 and job.now_s < 5.0
        assert job.peers[0].divided() == ([1], [2])

    def test_one_without_any_heartbeat_is_cut_off_itself(self):
        job = Job(SilenceLimits(3.0, 0.0, 0.0))
        job.run(1.0)
        with pytest.raises(PeerStalledError, match="^cut off: no heartbeat from any rank for .*: its host"):
            job.run(10.0, ranks=(0,))


def test_after_the_goodbye_it_is_nowhere_and_nothing_is_lost():
    job = Job(SilenceLimits(3.0, 0.0, 0.0))
    job.doing[1] = (Progress(2, 3, "barrier()"), Progress())
    job.peers[1].close()
    assert isinstance(job.peers[1].lost(0, "why", "lost"), Stopped)
    job.fabrics[1].close()
    job.run(10.0, ranks=(0, 2))
    assert job.peers[0].said_goodbye == {1} and not job.peers[0].settled(())
    assert job.peers[0].divided() == ([2], [])
    job.peers[2].close()
    job.run(10.2, ranks=(0,))
    assert job.peers[0].settled(())
