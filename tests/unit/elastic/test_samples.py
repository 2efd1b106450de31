"""The sampler through losses and joins: what is in the committed history of an epoch."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, Dict, List

import pytest

from ringcomm import api
from ringcomm.elastic.state import ElasticSampler, PartsState

SCHEDULES = 200


class Place:
    """What ``api.rank()`` and ``api.size()`` return to the process that runs now."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rank, self.size = 0, 1
        monkeypatch.setattr(api, "rank", lambda: self.rank)
        monkeypatch.setattr(api, "size", lambda: self.size)


class Process:
    """A process with a sampler in an elastic state, and its samples since the last commit."""

    def __init__(self, place: Place, rank: int, size: int, count: int, seed: int) -> None:
        self.place = place
        self.enter(rank, size)
        self.sampler = ElasticSampler(count, seed=seed)
        self.state = PartsState({}, sampler=self.sampler)
        self.at = 0
        self.open: List[int] = []

    def enter(self, rank: int, size: int) -> None:
        self.place.rank, self.place.size = rank, size

    def step(self, batch: int) -> bool:
        """Process a batch; whether there was one."""
        chosen = self.sampler.indices[self.at : self.at + batch]
        self.at += len(chosen)
        self.open += chosen
        self.sampler.record_batch(0, len(chosen))
        return bool(chosen)

    def commit(self) -> List[int]:
        """Save the state; the samples that are part of the history now."""
        for part in self.state._handlers.values():
            part.save()
        done, self.open = self.open, []
        return done

    def restore(self) -> None:
        self.state.restore()
        self.open = []

    def change(self, rank: int, size: int, newest: Dict[str, Any]) -> None:
        """What ``elastic.run`` does after a change: reset, then the newest state unless all have the same."""
        self.enter(rank, size)
        self.state.reset()
        if self.sampler.state_dict() != newest:
            self.sampler.load_state_dict(newest)
        self.commit()
        self.at = 0


def run_epoch(place: Place, choose: random.Random) -> None:
    """One epoch with random losses, joins and removals; checks its history."""
    count, batch, seed = choose.randrange(1, 90), choose.randrange(1, 5), choose.randrange(100)
    size = choose.randrange(1, 6)
    ranks = [Process(place, rank, size, count, seed) for rank in range(size)]
    history: List[int] = []
    most_ranks, changes = size, 0
    while True:
        # Read first: all ranks end an epoch together, because they have the same number of samples.
        more = [process.step(batch) for process in ranks]
        assert len(set(more)) == 1
        if not more[0]:
            break
        event = choose.random() if changes < 12 else 1.0
        if event < 0.12 and len(ranks) > 1:
            # A loss at the commit: some ranks have committed this step already. The newest state counts.
            survivors = choose.sample(ranks, choose.randrange(1, len(ranks)))
            ahead = choose.random() < 0.5
            committed = [process.commit() for process in ranks] if ahead else []
            history += [index for samples in committed for index in samples]
            late = survivors[0] if ahead and len(survivors) > 1 else None
            newest = None
            for process in survivors:
                if process is not late:
                    process.restore()
                    newest = process.sampler.state_dict()
            ranks, changes = [process for process in ranks if process in survivors], changes + 1
        elif event < 0.3:
            newest, changes = ranks[0].sampler.state_dict(), changes + 1
            history += [index for process in ranks for index in process.commit()]
            if event < 0.2 and len(ranks) > 1:
                ranks = choose.sample(ranks, choose.randrange(1, len(ranks)))  # removal
            else:
                total = len(ranks) + choose.randrange(1, 3)
                while len(ranks) < total:
                    ranks.append(Process(place, 0, 1, count, seed))
        else:
            if event < 0.7:
                history += [index for process in ranks for index in process.commit()]
            continue
        assert newest is not None
        most_ranks = max(most_ranks, len(ranks))
        for rank, process in enumerate(ranks):
            process.change(rank, len(ranks), newest)
    history += [index for process in ranks for index in process.commit()]
    found = Counter(history)
    assert set(found) == set(range(count))
    repeated = sum(found.values()) - count
    assert repeated < most_ranks, "only the division of the last samples may repeat some"


def test_every_sample_is_in_the_history_once(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(monkeypatch)
    for schedule in range(SCHEDULES):
        try:
            run_epoch(place, random.Random(schedule))
        except AssertionError as problem:
            raise AssertionError(f"schedule {schedule}: {problem}") from problem


def test_samples_are_divided_anew_although_no_state_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod's open issue: after a removal nothing resets the sampler, and samples are repeated or lost."""
    place = Place(monkeypatch)
    place.size = 2
    sampler = ElasticSampler(8, shuffle=False)
    state = PartsState({}, sampler=sampler)
    sampler.record_batch(0, 1)
    place.size = 1
    state.on_reset()
    assert list(sampler) == [2, 3, 4, 5, 6, 7]
    sampler.record_batch(1, 1)
    assert sampler.processed_num == 3
