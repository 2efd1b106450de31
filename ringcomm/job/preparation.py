"""What the ranks of a job do before the first call: compare their programs, and measure the machine."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Dict, List, Optional, Sequence

from ..collective.measure import agreed, measure
from ..collective.runner import Runner
from ..config import Settings
from ..configuration.polling import usable_cores
from ..group.view import Peer
from ..rendezvous.joined import Joined
from ..schedule.cost import CostModel
from ..schedule.select import Selector
from ..transport.base import Channels
from ..transport.process_memory import ReadingLink
from ..transport.tcp import STREAMS
from .program import compare_programs


class Preparation:
    """Compares and measures, together with all ranks.

    Args:
        runner: of the calls in order.
        channels: links to the other ranks.
        rank: this rank.
        peers: all ranks, in rank order.
        settings: tunables.
        joined: the rendezvous' side of the job, if there is one.
    """

    def __init__(
        self,
        runner: Runner,
        channels: Channels,
        rank: int,
        peers: Sequence[Peer],
        settings: Settings,
        joined: Optional[Joined],
    ) -> None:
        self._runner = runner
        self._channels = channels
        self._rank = rank
        self._peers = peers
        self._settings = settings
        self._joined = joined

    def compare_programs(self) -> None:
        """Warn if the ranks do not run the same files."""
        runner = self._preliminary()
        runner.purpose = lambda: "the comparison of programs in init()"
        text = compare_programs(runner, [peer.host for peer in self._peers])
        if text and self._rank == 0 and self._joined is not None:
            self._joined.control.warn("program", text)

    def _preliminary(self) -> Runner:
        """A runner for what is exchanged before the first call."""
        limit_s = min(self._settings.timeout_s or math.inf, self._settings.start_timeout_s)
        return self._runner.with_settings(replace(self._settings, timeout_s=limit_s))

    def tune(self, selector: Selector) -> Optional[CostModel]:
        """Measure the machine, and choose schedules by that from now on.

        Args:
            selector: chooses them.

        Returns:
            the links as they were measured; None: they were not.
        """
        own, size = self._peers[self._rank], len(self._peers)
        hosts = [peer.host_index for peer in self._peers]
        local_size = hosts.count(own.host_index)
        runner = self._preliminary()
        crowded = local_size > usable_cores()
        alone = local_size == size
        links = [self._channels.direct.link(peer) for peer in range(size) if peer != self._rank]
        wanted = self._settings.measure and not (alone and crowded)
        oversubscribed = alone and crowded and all(link.carrier in STREAMS for link in links)
        wanted, oversubscribed = agreed(runner, [wanted, oversubscribed])
        model = measure(runner, hosts) if wanted else None
        selector.adopt(model, oversubscribed)
        return model

    def carriers(self) -> str:
        """Return what this rank exchanges data through with each other rank, in one line."""
        others = [peer for peer in range(len(self._peers)) if peer != self._rank]
        links = {peer: self._channels.direct.link(peer) for peer in others}
        ways: Dict[str, List[int]] = {}
        for peer, link in links.items():
            ways.setdefault(link.carrier, []).append(peer)
        told = (f"{way} with rank {', '.join(str(peer) for peer in peers)}" for way, peers in ways.items())
        sizes = [
            f" (up to {link.ring_most_bytes // 1024} KiB through shared memory)"
            for link in links.values()
            if isinstance(link, ReadingLink)
        ]
        return f"rank {self._rank} exchanges data through " + ", ".join(told) + "".join(sizes[:1])
