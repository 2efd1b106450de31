"""What the ranks of a job do before the first call: compare their programs, and measure the machine."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Dict, List, NamedTuple, Optional

from ..collective.measure import gathered, measure
from ..collective.runner import Runner
from ..configuration.polling import usable_cores
from ..group.group import Group
from ..schedule.calibration import part_of
from ..schedule.cost import CostModel
from ..schedule.select import Selector
from ..transport.process_memory import ReadingLink
from ..transport.tcp import STREAMS
from .program import compare_programs


class Prepared(NamedTuple):
    """What ranks have found out together before the first call of a view, for the views after it.

    Attributes:
        generation: of the view: where it is the same, the ranks and the model are.
        rank: this process's rank there.
        model: the links as they were measured; None: they were not.
    """

    generation: int
    rank: int
    model: Optional[CostModel]


class Preparation:
    """Compares and measures, together with all ranks.

    Args:
        group: the ranks of the job.

    Attributes:
        is_repeated: after :meth:`tune`: whether all ranks have prepared an earlier view together.
        prepared: after :meth:`tune`: what this rank keeps for the next view.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.is_repeated = False
        self.prepared: Optional[Prepared] = None
        self._links = {
            peer: group.channels.direct.link(peer) for peer in range(group.size) if peer != group.rank
        }

    def compare_programs(self) -> None:
        """Warn if the ranks do not run the same files."""
        runner = self._preliminary()
        runner.purpose = lambda: "the comparison of programs in init()"
        text = compare_programs(runner, self._group.hosts)
        if text and self._group.rank == 0 and self._group.control is not None:
            self._group.control.warn("program", text)

    def _preliminary(self) -> Runner:
        """A runner for what is exchanged before the first call."""
        settings = self._group.settings
        limit_s = min(settings.timeout_s or math.inf, settings.start_timeout_s)
        return self._group.runner.with_settings(replace(settings, timeout_s=limit_s))

    def tune(self, selector: Selector, before: Optional[Prepared] = None) -> Optional[CostModel]:
        """Measure the machine, and choose schedules by that from now on.

        What all ranks have measured together in an earlier view is not measured again: after a loss the
        links of the ranks that are left are as fast as they were.

        Args:
            selector: chooses them.
            before: what this rank has kept of the last view that it has prepared.

        Returns:
            the links as they were measured; None: they were not.
        """
        group = self._group
        hosts = [peer.host_index for peer in group.peers]
        runner = self._preliminary()
        crowded = group.local_size > usable_cores()
        alone = group.local_size == group.size
        wanted = group.settings.measure and not (alone and crowded)
        oversubscribed = alone and crowded and all(link.carrier in STREAMS for link in self._links.values())
        generation, rank, model = before or Prepared(-1, -1, None)
        everybodys = gathered(runner, [wanted, oversubscribed, generation, rank])
        wanted, oversubscribed = (bool(everybodys[:, column].all()) for column in (0, 1))
        self.is_repeated = generation >= 0 and bool((everybodys[:, 2] == generation).all())
        if self.is_repeated and model is not None:
            model = part_of(model, [int(number) for number in everybodys[:, 3]], hosts)
        else:
            model = None
        if wanted and model is None:
            model = measure(runner, hosts)
        model = model if wanted else None
        selector.adopt(model, oversubscribed)
        self.prepared = Prepared(group.generation, group.rank, model)
        return model

    def carriers(self) -> str:
        """Return what this rank exchanges data through with each other rank, in one line."""
        ways: Dict[str, List[int]] = {}
        for peer, link in self._links.items():
            ways.setdefault(link.carrier, []).append(peer)
        told = (f"{way} with rank {', '.join(str(peer) for peer in peers)}" for way, peers in ways.items())
        sizes = [
            f" (up to {link.ring_most_bytes // 1024} KiB through shared memory)"
            for link in self._links.values()
            if isinstance(link, ReadingLink)
        ]
        return f"rank {self._group.rank} exchanges data through " + ", ".join(told) + "".join(sizes[:1])
