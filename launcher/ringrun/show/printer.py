"""The output of a job: its ranks' output as prefixed lines and as files, and ringrun's own messages."""

from __future__ import annotations

from typing import Container, Dict, List, Mapping, Optional, Sequence, Tuple

from ringcomm.clock import Clock

from ..plan.job import Job
from .console import Console, OutputFiles
from .output import Outputs
from .visible import visible

STDOUT, STDERR = 1, 2
STATE_INTERVAL_S = 0.1
"""Minimum time between two states of progress bars at the bottom of a terminal."""


class Printer:
    """Writes output to the console with prefixes, and to ``--output-dir`` unchanged; ConfigError if that
    fails. `coloured` is by stream; `block` are lines at the bottom of a terminal, above progress bars.
    """

    def __init__(self, job: Job, console: Console, coloured: Mapping[int, bool], clock: Clock) -> None:
        hosts = {place.rank: job.hosts[place.host_index].name for place in job.plan.places}
        self.console, self._clock = console, clock
        self._outputs = Outputs(hosts, coloured, console.terminals)
        self._state: Optional[Tuple[int, Sequence[bytes]]] = None
        self.block: Sequence[bytes] = ()
        self._next_state_s = 0.0
        self._files: Optional[OutputFiles] = None
        if job.output_dir is not None:
            self._files = OutputFiles(job.output_dir, job.plan.size)

    def add(self, rank: int, host: str) -> None:
        """Add a rank to the job; ConfigError if its files in ``--output-dir`` cannot be written."""
        self._outputs.add(rank, host)
        if self._files is not None:
            self._files.add(rank)

    def remove(self, rank: int) -> None:
        """Forget a rank that has ended, with its last lines, and close its files."""
        self._outputs.remove(rank)
        if self._files is not None:
            self._files.remove(rank)

    @property
    def waiting(self) -> bool:
        """Whether :meth:`tick` must be called soon."""
        return self._outputs.waiting or bool(self.block)

    def tails(self) -> Dict[int, List[str]]:
        """Return the last lines on stderr, by rank."""
        return {rank: tail.text() for rank, tail in self._outputs.tails.items()}

    def printed(self, rank: int, stream: int, data: bytes) -> None:
        """Write a rank's output on stream 1 (stdout) or 2 (stderr)."""
        if rank in self._outputs.tails:
            if self._files is not None:
                self._files.write(rank, stream, data)
                if self._files.problem:
                    self.show(self._files.problem)
                    self._files.problem = ""
            self._write([(stream, self._outputs.feed(rank, stream, data, self._clock()))])

    def ending(self, rank: int) -> None:
        """Note the end of a rank's program, whose process has not exited yet."""
        if rank in self._outputs.tails:
            self._outputs.ending(rank)

    def ended(self, rank: int, ok: bool) -> None:
        """Write the rest of a rank's output after its process has ended."""
        self._write(self._outputs.flush(rank, ok, self._clock()))

    def tick(self) -> None:
        """Write delayed output that is due: progress bars and tracebacks."""
        self._write(self._outputs.tick(self._clock()))

    def settle(self, shown: Container[int], reported: Sequence[str] = ()) -> None:
        """Write delayed tracebacks; see :meth:`.Outputs.settle`."""
        self._write(self._outputs.settle(shown, reported))

    def show(self, text: str) -> None:
        """Write a message of ringrun to stderr; control characters become visible."""
        lines = [f"ringrun: {line}\n" for line in visible(text).splitlines()]
        self.console.write(STDERR, "".join(lines).encode())

    def close(self) -> None:
        if self._files is not None:
            self._files.close()

    def _write(self, chunks: List[Tuple[int, bytes]]) -> None:
        for stream, data in chunks:
            if data:
                self.console.write(stream, data)
                self._state = None
        now_s = self._clock()
        if self.console.terminals and now_s >= self._next_state_s:
            state = self._lines_at_bottom()
            if state != self._state:
                self.console.show_state(*(state or (STDERR, ())))
                self._state, self._next_state_s = state, now_s + STATE_INTERVAL_S

    def _lines_at_bottom(self) -> Optional[Tuple[int, Sequence[bytes]]]:
        bars = self._outputs.state()
        if not self.block:
            return None if bars is None else (bars[0], [bars[1]])
        stream = STDERR if STDERR in self.console.terminals else STDOUT
        return stream, [*self.block, *([] if bars is None else [bars[1]])]
