"""The steps of all ranks before the first call: compare their programs, and measure the machine."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from ..collective.measure import gathered, measure
from ..collective.runner import Runner
from ..configuration.polling import cores_together, own_cores
from ..group.group import Group
from ..schedule.calibration import part_of
from ..schedule.cost import CostModel
from ..schedule.select import Selector
from ..transport.process_memory import ReadingLink
from .program import compare_programs


class Prepared(NamedTuple):
    """Results of a view's preparation, which later views reuse."""

    generation: int  # of the view; equal numbers mean equal ranks and model; negative: none
    rank: int  # this process's rank in that view
    model: Optional[CostModel]  # the measured links; None: not measured


NEW = Prepared(-1, -1, None)  # of a process that has prepared no view
# after a view in which links or hosts were silent: its measurements are invalid
SILENT = Prepared(-2, -1, None)


class Preparation:
    """Compare and measure, together with all ranks.

    After :meth:`tune`, ``is_repeated`` says whether all ranks prepared an earlier view together, and
    ``prepared`` is what the next view needs.
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
        """Return a runner for the exchanges before the first call."""
        settings = self._group.settings
        limit_s = min(settings.timeout_s or math.inf, settings.start_timeout_s)
        return self._group.runner.with_settings(replace(settings, timeout_s=limit_s))

    def tune(self, selector: Selector, before: Optional[Prepared] = None) -> Optional[CostModel]:
        """Measure the machine, choose schedules accordingly, and return the measured links, if any.

        Ranks do not measure again what they measured together in an earlier view: after a loss the remaining
        links are as fast as before.
        """
        group = self._group
        hosts = [peer.host_index for peer in group.peers]
        runner = self._preliminary()
        generation, rank, model = before or NEW
        own = [group.settings.measure, generation, rank, *own_cores()]
        everybodys = gathered(runner, own)
        cores = cores_together((int(first), int(count)) for first, count in everybodys[:, 3:])
        crowded = group.size == group.local_size > cores
        wanted = bool(everybodys[:, 0].all()) and not crowded
        self.is_repeated = generation >= 0 and bool((everybodys[:, 1] == generation).all())
        if wanted:
            model = self._known(everybodys, model, hosts) or measure(runner, hosts)
        else:
            model = None
        selector.adopt(model)
        self.prepared = Prepared(group.generation, group.rank, model)
        return model

    def _known(
        self, everybodys: Any, model: Optional[CostModel], hosts: Sequence[int]
    ) -> Optional[CostModel]:
        """Return the links by the ranks' earlier measurements; None if all have to measure.

        ``everybodys`` is what :meth:`tune` gathered, by rank; ``model`` is from this rank's earlier view.
        """
        if not self.is_repeated or model is None:
            return None
        return part_of(model, [int(rank) for rank in everybodys[:, 2]], hosts)

    def carriers(self) -> str:
        """Return, in one line, which carrier this rank uses for each other rank."""
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
