"""The display of a job's counters: the live view and the report."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Optional

from ringcomm.errors import ConfigError


class Observation(NamedTuple):
    """Where counters of ranks are shown: in a table while the job runs, and in an HTML file at the end."""

    watch: bool = False
    report: Optional[Path] = None

    @property
    def needs_numbers(self) -> bool:
        """Whether counters must be requested from ranks."""
        return self.watch or self.report is not None


def observation_of(watch: bool, report: Optional[str]) -> Observation:
    """Return the observation for ``--watch`` and ``--report``; ConfigError if the report cannot be written
    there.
    """
    found = Observation(watch, None if report is None else Path(report).absolute())
    if found.report is not None and (found.report.is_dir() or not found.report.parent.is_dir()):
        raise ConfigError(f"--report {report}: this is a directory, or its directory does not exist.")
    return found
