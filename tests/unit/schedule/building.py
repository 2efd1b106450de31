"""Schedules by the names of their algorithms, for tests."""

from __future__ import annotations

from ringcomm.schedule import registry
from ringcomm.schedule import select as _select  # noqa: F401  registers the algorithms
from ringcomm.schedule.registry import Problem
from ringcomm.schedule.steps import even_bounds


def names(collective, hosts=False):
    """Those of a collective; without the ones that need several hosts unless asked for."""
    return [item.name for item in registry.algorithms(collective) if hosts or not item.needs_hosts]


def make(collective, name, rank, size, count, *, bounds=None, hosts=None, root=0):
    """One rank's schedule."""
    edges = even_bounds(count, size) if bounds is None else bounds
    return registry.build(collective, name, Problem(rank, size, count, edges, hosts, root))
