"""The display of a job's counters: the live view and the report."""

from __future__ import annotations

from pathlib import Path
from typing import FrozenSet, NamedTuple, Optional

from ringcomm.errors import ConfigError


class Observation(NamedTuple):
    """Where counters of ranks are shown: in a table while the job runs, and in an HTML file at the end."""

    watch: bool = False
    report: Optional[Path] = None

    @property
    def needs_numbers(self) -> bool:
        """Whether counters must be requested from ranks."""
        return self.watch or self.report is not None


def ranks_shown(text: Optional[str], size: Optional[int]) -> Optional[FrozenSet[int]]:
    """Return the ranks of ``--only-rank``, or None for all. `size` is None if it may change. ConfigError if
    there are no such ranks.
    """
    if text is None:
        return None
    items = [item.strip() for item in text.split(",")]
    if not all(item.isdecimal() and len(item) < 9 for item in items):
        raise ConfigError(f"--only-rank {text!r:.80}: write the numbers of ranks, like 0 or 0,2.")
    found = frozenset(map(int, items))
    if size is not None and max(found) >= size:
        raise ConfigError(f"--only-rank {text}: there is no rank {max(found)}; the last one is {size - 1}.")
    return found


def observation_of(watch: bool, report: Optional[str], flight_recorder: int) -> Observation:
    """Return the observation for ``--watch`` and ``--report``. Ranks report on the flight recorder's socket.
    ConfigError if that is off, or the report cannot be written there.
    """
    found = Observation(watch, None if report is None else Path(report).absolute())
    if found.needs_numbers and not flight_recorder:
        raise ConfigError(
            "--watch and --report need the flight recorder, on whose socket ranks report. Leave out "
            "--flight-recorder 0."
        )
    if found.report is not None and (found.report.is_dir() or not found.report.parent.is_dir()):
        raise ConfigError(f"--report {report}: this is a directory, or its directory does not exist.")
    return found
