"""The places of calls in the user's program, and the calls that ranks have made at different lines."""

from __future__ import annotations

import dis
import logging
import os
import sys
import threading
import zlib
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, Callable, Container, Dict, List, Mapping, Optional, Sequence, Set, Tuple

import numpy as np

from ..ops import ReduceOp
from ..transport.base import Fabric

logger = logging.getLogger("ringcomm")

Site = Tuple[CodeType, int]
"""A place as it is found, code and instruction: its text is made only when it is read.

It holds no frame, which would keep the caller's variables alive.
"""

OtherSite = Tuple[int, int, int]
"""A call that counts as the same, made at another line: the rank, :func:`site_number` here and there."""

_packages = [f"{Path(__file__).resolve().parent.parent}{os.sep}"]
_ours: Dict[str, bool] = {}
_numbers: Dict[Tuple[int, int], Tuple[int, CodeType]] = {}
_MAX_NUMBERS = 4096
_labels: Dict[int, str] = {}
_MAX_DIFFERENCES = 8
_truncating: Set[str] = set()


def look_through(package: ModuleType) -> None:
    """Exclude a package, or a module that is a single file, from the user's program that it calls for."""
    path = Path(package.__file__ or "").resolve()
    place = f"{path.parent}{os.sep}" if path.name == "__init__.py" else str(path)
    if package.__file__ and place not in _packages:
        _packages.append(place)
        _ours.clear()


def is_ours(filename: str) -> bool:
    """Return whether a file belongs to ringcomm, or to a package that calls it for the user."""
    known = _ours.get(filename)
    if known is None:
        known = _ours[filename] = str(Path(filename).resolve()).startswith(tuple(_packages))
    return known


def _outside(depth: int) -> FrameType:
    frame = sys._getframe(depth)
    ours = _ours
    while ours.get(frame.f_code.co_filename) or is_ours(frame.f_code.co_filename):
        caller = _caller(frame)
        if caller is None:
            break
        frame = caller
    return frame


def _caller(frame: FrameType) -> Optional[FrameType]:
    """Return the caller, or None of a thread's function: `threading` is not a place in a program."""
    caller = frame.f_back
    return None if caller is None or caller.f_code.co_filename == threading.__file__ else caller


def find_site(depth: int, known: List[Any]) -> Site:
    """Return the innermost place outside ringcomm that led here. ``depth``: this many callers, that of this
    function being 1, are known to be inside. ``known``: :func:`nowhere` the first time, then depth and code
    of the last result, which is tried first: walking costs more than the rest.
    """
    try:
        frame = sys._getframe(known[0])
        code = frame.f_code
        if code is known[1]:
            return code, frame.f_lasti
    except ValueError:
        pass  # the stack is not that deep this time
    frame = _outside(depth + 1)
    known[:] = _depth_of(frame), frame.f_code, -1, 0
    return frame.f_code, frame.f_lasti


def nowhere() -> List[Any]:
    """Return the initial ``known`` of a place: depth, code, and for one instruction its number."""
    return [0, None, -1, 0]


def number_of_known(site: Site, known: List[Any]) -> int:
    """Return the :func:`site_number` of :func:`find_site`'s result, and keep it for the same instruction."""
    number = site_number(site)
    known[1:] = *site, number
    return number


def this_site() -> Site:
    """Return :func:`find_site`'s result where nothing is known."""
    return comparable_site()[0]


def comparable_site(unequal: Container[str] = ()) -> Tuple[Site, bool]:
    """Return the innermost place outside ringcomm, and whether ranks make this call at the same place. They
    do not in a callback that any thread may run, as it has no place in the user's program. ``unequal``: files
    of looked-through packages that make calls for a rank while the others are elsewhere in their programs.
    """
    frame, comparable = sys._getframe(1), True
    while is_ours(frame.f_code.co_filename):
        caller = _caller(frame)
        if caller is None or frame.f_code.co_filename in unequal:
            comparable = False
        if caller is None:
            break
        frame = caller
    return (frame.f_code, frame.f_lasti), comparable


def _depth_of(wanted: FrameType) -> int:
    """Return the depth of a frame, as the caller of this function would pass it to ``sys._getframe``."""
    depth = 0
    while sys._getframe(depth + 1) is not wanted:
        depth += 1
    return depth


def site_text(site: Site) -> str:
    """Return ``file:line``."""
    return f"{site[0].co_filename}:{_line(site)}"


def _line(site: Site) -> int:
    code, instruction = site
    found = code.co_firstlineno
    for offset, line in dis.findlinestarts(code):
        if offset > instruction:
            break
        found = line or found
    return found


def site_number(site: Site) -> int:
    """Return a place as 64 bits, the same on every host: a hash of the file's name above, the line below.
    Never 0. The directory is left out, because it may differ between hosts.
    """
    key = (id(site[0]), site[1])
    known = _numbers.get(key)
    if known is None:
        if len(_numbers) >= _MAX_NUMBERS:
            _numbers.clear()
        label = file_label(site[0].co_filename)
        _labels[zlib.crc32(label.encode())] = label
        # With the code, so that its id stays its own.
        known = _numbers[key] = (zlib.crc32(label.encode()) << 32 | max(1, _line(site)), site[0])
    return known[0]


def number_text(number: int) -> str:
    """Return ``train.py:88`` for a :func:`site_number` of this or another rank."""
    wanted, line = number >> 32, number & 0xFFFFFFFF
    label = _labels.get(wanted)
    if label is None:
        # Not a file of calls on this rank; but its program has probably loaded it.
        files = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
        found = {zlib.crc32(label.encode()): label for label in map(file_label, files)}
        label = found.get(wanted)
    return f"line {line} of a file that this rank has not loaded" if label is None else f"{label}:{line}"


def short_site(text: str) -> str:
    """Return ``train.py:88`` for ``/home/me/train.py:88``, as :func:`number_text` does."""
    filename, _, line = text.rpartition(":")
    return f"{file_label(filename)}:{line}"


def file_label(filename: str) -> str:
    """Return a file's name without its directory; with it where every package has a file of that name."""
    directory, _, name = filename.rpartition(os.sep)
    return f"{directory.rpartition(os.sep)[2]}/{name}" if name == "__init__.py" else name


def call_site() -> str:
    """Return file and line of the caller's code that led here, at once."""
    frame = _outside(2)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def note_truncation(op: ReduceOp, dtype: np.dtype[Any]) -> None:
    """Warn once per line of the program if it averages integers: the result is an integer as well."""
    if op != ReduceOp.AVERAGE or dtype.kind not in "iu":
        return
    site = call_site()
    if site not in _truncating and len(_truncating) < _MAX_NUMBERS:
        _truncating.add(site)
        logger.warning(
            "%s: the average of integers (%s) is truncated to an integer; of 0 and 1 it is 0. Convert them "
            "to floating-point numbers first, or use op=Sum.",
            site, dtype.name,
        )  # fmt: skip


class CallSites:
    """Records the calls that ranks have made at different lines of the program, and warns of the first."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        # ready for JSON: ``op`` (number), ``what`` (the call), ``sites`` (text by rank)
        self.differences: List[Dict[str, Any]] = []
        self._warn = warn
        self._met: Set[Tuple[int, int]] = set()

    def met(self, op: int, call: Any, fabric: Fabric, found: Sequence[OtherSite]) -> None:
        """Record that call number ``op`` has met calls of other ranks from other lines."""
        rank = fabric.rank_of(fabric.rank)
        for peer, here, there in found:
            if (here, there) not in self._met and len(self._met) < _MAX_DIFFERENCES:
                self._met.add((here, there))
                what = call.describe()
                sites = {rank: number_text(here), fabric.rank_of(peer): number_text(there)}
                self.add(op, what, f"Call number {op}, {what},", sites)

    def differ(self, op: int, call: Any, subject: str, sites: Mapping[int, str]) -> None:
        """Record a call that ranks make at different lines. ``subject``: the call without its description;
        ``sites``: ``file:line`` by rank, "" if unknown.
        """
        labels = {rank: short_site(site) for rank, site in sites.items() if site}
        if len(set(labels.values())) > 1:
            what = call.describe()
            self.add(op, what, f"{subject}, {what},", labels)

    def add(self, op: int, what: str, subject: str, sites: Mapping[int, str]) -> None:
        """Record a difference, unless these lines have met before or too many have, and warn of the first.
        ``subject``: the call for the beginning of a sentence.
        """
        lines = set(sites.values())
        if len(self.differences) >= _MAX_DIFFERENCES or any(
            lines == set(known["sites"].values()) for known in self.differences
        ):
            return
        texts = {str(rank): site for rank, site in sorted(sites.items())}
        self.differences.append({"op": op, "what": what, "sites": texts})
        if len(self.differences) == 1:
            self._warn(other_lines_text(subject, sites))


def other_lines_text(call: str, sites: Mapping[int, str]) -> str:
    """Return the warning that ranks make what counts as the same call at different lines."""
    return (
        f"{call} comes from different lines of the program: {sites_text(sites)}. If one rank makes a call "
        "more than the others, each of its calls from here on meets another call of theirs, and the results "
        "are wrong. If these lines belong together, all is well. This is said once."
    )


def sites_text(sites: Mapping[int, str]) -> str:
    """Return text like ``rank 0 at train.py:7, ranks 1, 2 at train.py:9``."""
    alike: Dict[str, List[int]] = {}
    for rank in sorted(sites):
        alike.setdefault(sites[rank], []).append(rank)
    return ", ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} at {site}"
        for site, ranks in alike.items()
    )
