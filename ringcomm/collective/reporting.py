"""Where a runner reports failures, and what it finds out about the calls of other ranks."""

from __future__ import annotations

import logging
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from ..errors import MismatchError, PeerLostError, PeerStalledError, RingcommError, fresh_copy
from ..transport.base import Watch
from .sites import number_text

logger = logging.getLogger("ringcomm")

_MOST_DIFFERENCES = 8


class Reporter(Watch):
    """Where failures are reported, and the common verdict comes from. This one has nobody to ask.

    Attributes:
        who_is_heard, verdict: as in :class:`~ringcomm.rendezvous.control.ControlChannel`.
    """

    who_is_heard: Optional[Callable[[], Tuple[List[int], List[int]]]] = None
    verdict: Optional[RingcommError] = None

    def fileno(self) -> int:
        return -1

    def check(self) -> None:
        if self.verdict is not None:
            raise fresh_copy(self.verdict)

    def report_lost(self, peer: int, doing: str, why: str, kind: str = "lost") -> RingcommError:
        """A peer is lost, or else silent, stalled or late: the error to raise."""
        if self.verdict is None:
            error = PeerLostError if kind == "lost" else PeerStalledError
            during = f" while this rank was in {doing}" if doing else ""
            text = f"rank {peer} was lost{during}: {why}."
            self.verdict = error(text, rank=peer)
        return fresh_copy(self.verdict)

    def report_mismatch(self, peer: int, text: str) -> RingcommError:
        """A peer is in a different call: the error to raise."""
        return MismatchError(text, peer=peer)

    def note_closed(self, peer: int, why: str) -> None:
        """The link to a peer ended without a goodbye, while nobody waited for that peer."""

    def warn(self, topic: str, text: str) -> None:
        """Warn the user; of one topic a job warns once."""
        logger.warning("%s", text)


class CallSites:
    """Keeps which calls ranks have made at different lines of the program, and warns of the first.

    Args:
        warn: told the text, once.
        strict: whether such a call is an error; whoever compares raises it.

    Attributes:
        differences: the first time that these lines met, ready for JSON: ``op`` (number of the call),
            ``what`` (the call) and ``sites`` (for each rank, as text, where it made it).
    """

    def __init__(self, warn: Callable[[str], None], strict: bool = False) -> None:
        self.strict = strict
        self.differences: List[Dict[str, Any]] = []
        self._warn = warn
        self._met: Set[Tuple[int, int]] = set()

    def met(self, op: int, call: Any, rank: int, found: Sequence[Tuple[int, int, int]]) -> None:
        """A call in order has met calls from other lines.

        Args:
            op: number of the call.
            call: can ``describe()`` itself.
            rank: this rank.
            found: for each, the peer, the site here and the peer's, see :func:`~.sites.site_number`.
        """
        for peer, here, there in found:
            if (here, there) not in self._met and len(self._met) < _MOST_DIFFERENCES:
                self._met.add((here, there))
                what = call.describe()
                sites = {rank: number_text(here), peer: number_text(there)}
                self.add(op, what, f"Call number {op}, {what},", sites)

    def add(self, op: int, what: str, subject: str, sites: Mapping[int, str]) -> None:
        """Keep it, unless these lines have met before or too many have, and warn if it is the first.

        Args:
            op: number of the call.
            what: the call as a person would write it.
            subject: the same for the beginning of a sentence.
            sites: for each rank, where it made the call.
        """
        lines = set(sites.values())
        if len(self.differences) >= _MOST_DIFFERENCES or any(
            lines == set(known["sites"].values()) for known in self.differences
        ):
            return
        texts = {str(rank): site for rank, site in sorted(sites.items())}
        self.differences.append({"op": op, "what": what, "sites": texts})
        if len(self.differences) == 1:
            self._warn(other_lines_text(subject, sites))


def other_lines_text(call: str, sites: Mapping[int, str]) -> str:
    """The warning that ranks make what counts as the same call at different lines.

    Args:
        call: which call, as the subject of a sentence.
        sites: for each rank, where it made it.
    """
    return (
        f"{call} comes from different lines of the program: {sites_text(sites)}. If one rank makes a call "
        "more than the others, each of its calls from here on meets another call of theirs, and the results "
        "are wrong. If these lines belong together, all is well. This is said once; --check-calls "
        "(RINGCOMM_CHECK_CALLS=1) makes it an error."
    )


def sites_text(sites: Mapping[int, str]) -> str:
    """Like ``rank 0 at train.py:7, ranks 1, 2 at train.py:9``."""
    alike: Dict[str, List[int]] = {}
    for rank in sorted(sites):
        alike.setdefault(sites[rank], []).append(rank)
    return ", ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} at {site}"
        for site, ranks in alike.items()
    )
