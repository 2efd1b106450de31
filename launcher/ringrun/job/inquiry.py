"""Requests flight records of all ranks: when the job has failed, or when the user asks."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, Sequence

from ..diagnosis.first_failure import Complaint, FirstFailure
from ..diagnosis.records import Records, explain, has_operations, keep_records
from ..plan.job import Job
from ..reach.agent_process import AgentLink
from .event_loop import Loop

ANSWER_S = 1.8
"""Seconds to wait for the agents' answers; see :data:`ringrun.agent.recorders.ANSWER_S`."""


class Inquiry:
    """One job's flight records, from the request to the files. `ranks_now` returns the process numbers of an
    elastic job by rank, and () for other jobs.
    """

    def __init__(
        self,
        job: Job,
        links: Sequence[AgentLink],
        loop: Loop,
        print_text: Callable[[str], None],
        failure: FirstFailure,
        ranks_now: Callable[[], Sequence[int]],
    ) -> None:
        self._job, self._links, self._loop, self._print, self._failure = job, links, loop, print_text, failure
        self._records, self._ranks_now = Records(job), ranks_now
        self._asked = False

    def after_failure(self) -> None:
        """Request records from the ranks that are alive, once. Records of ranks that failed stay."""
        if not self._asked:
            self._asked = True
            self._records.forget(failed=True)
            self._ask()

    def for_the_user(self) -> None:
        """Show the records on the user's request; the job continues."""
        if not self._asked and not self._loop.is_set("inquiry"):
            self._records.forget()
            self._ask()
            self._loop.after("inquiry", ANSWER_S, self._show)

    def _ask(self) -> None:
        for link in self._links:
            if link.answered and link.alive:
                link.send({"do": "diagnose"})

    def take(self, rank: int, data: bytes) -> str:
        """Store an answer, or the record of a rank that fails or ends; return its reason."""
        reason = self._records.take(rank, data)
        exits = self._failure.exits
        living = self._job.plan.size - len(exits)
        if self._loop.is_set("inquiry") and self._records.answered(exits) >= living:
            self._loop.cancel("inquiry")
            self._show()
        return reason

    def _show(self) -> None:
        contents = self._complete()
        parts = self._numbers(), explain(contents), self._keep(contents)
        self._print("\n".join(filter(None, parts)))

    def _complete(self) -> Dict[int, Dict[str, Any]]:
        return self._records.complete(self._failure.exits, self._failure.lost, self._ranks_now())

    def _numbers(self) -> str:
        """Return a sentence that maps ranks to processes, if their numbers differ; or ""."""
        changed = [f"rank {rank} is process {it}" for rank, it in enumerate(self._ranks_now()) if rank != it]
        return f"In the last view {', '.join(changed)}." if changed else ""

    def _keep(self, contents: Mapping[int, Mapping[str, object]]) -> str:
        """Write the files; return a sentence with their place, or why they could not be written."""
        try:
            folder, why_there = keep_records(self._job, contents)
        except OSError as problem:
            where = "" if problem.filename is None else f"{problem.filename}: "
            why = f"{where}{problem.strerror or problem}"
            return f"The flight records could not be written: {why}. Name a folder with --diagnose-dir."
        more = f" ({why_there})" if why_there else ""
        return f"Their last operations and stacks: ringrun diagnose {folder}{more}"

    @property
    def made_no_call(self) -> bool:
        """See :meth:`~ringrun.diagnosis.records.Records.made_no_call`."""
        return self._records.made_no_call()

    def is_victim(self, rank: int) -> bool:
        """See :meth:`~ringrun.diagnosis.records.Records.is_victim`."""
        return self._records.is_victim(rank)

    def explanations(self, tails: Mapping[int, Sequence[str]]) -> List[Complaint]:
        """See :meth:`~ringrun.diagnosis.records.Records.explanations`."""
        return self._records.explanations(tails)

    def conclude(self) -> str:
        """Return the last paragraph of the failed job's box; "" without a record of an operation."""
        contents = self._complete()
        if not has_operations(contents):
            return ""
        parts = self._numbers(), explain(contents), self._keep(contents)
        return "\n".join(filter(None, parts))
