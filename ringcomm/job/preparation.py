"""The steps of all ranks before the first call: compare their programs, and measure the machine.

The program is the script, and its imports from its own folder. Ranks compare one hash of all files; if it
differs, they exchange the hash of every file.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import sysconfig
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ..collective.measure import gathered, measure
from ..collective.rows import cumulative
from ..collective.runner import Runner
from ..configuration.settings import cores_together, own_cores
from ..group.group import Group
from ..ops import Collective
from ..schedule.cost import CostModel, part_of
from ..schedule.select import Selector
from ..transport.local import ReadingLink
from ..wire.signature import ahead_of, direct_call


class Prepared(NamedTuple):
    """Results of a view's preparation, which later views reuse."""

    generation: int  # of the view; equal numbers mean equal ranks and model; -1: there was none
    rank: int  # this process's rank in that view
    model: Optional[CostModel]  # the measured links; None: not measured


def preliminary(group: Group) -> Runner:
    """Return a runner for the exchanges before the first call."""
    settings = group.settings
    limit_s = min(settings.timeout_s or math.inf, settings.start_timeout_s)
    return group.runner.with_settings(replace(settings, timeout_s=limit_s))


def tune(group: Group, selector: Selector, before: Optional[Prepared] = None) -> Tuple[Prepared, bool]:
    """Measure the machine, together with all ranks, unless all did so in the view ``before``, and choose
    schedules accordingly; return the results, and whether all ranks prepared that view together. After a loss
    the remaining links are as fast as before.
    """
    hosts = [peer.host_index for peer in group.peers]
    runner = preliminary(group)
    generation, rank, model = before or Prepared(-1, -1, None)
    everybodys = gathered(runner, [group.settings.measure, generation, rank, *own_cores()])
    cores = cores_together((int(first), int(count)) for first, count in everybodys[:, 3:])
    crowded = group.size == group.local_size > cores
    is_repeated = generation >= 0 and bool((everybodys[:, 1] == generation).all())
    if everybodys[:, 0].all() and not crowded:
        ranks = [int(rank) for rank in everybodys[:, 2]]
        known = is_repeated and model is not None and not model.relayed and not group.relayed
        again = part_of(model, ranks, hosts) if known and model is not None else None
        model = again or measure(runner, hosts, group.relayed)
    else:
        model = None
    selector.adopt(model)
    return Prepared(group.generation, group.rank, model), is_repeated


def carriers(group: Group) -> str:
    """Return, in one line, which carrier this rank uses for each other rank."""
    links = {peer: group.channels.direct.link(peer) for peer in range(group.size) if peer != group.rank}
    ways: Dict[str, List[int]] = {}
    for peer, link in links.items():
        ways.setdefault(link.carrier, []).append(peer)
    told = (f"{way} with rank {', '.join(str(peer) for peer in peers)}" for way, peers in ways.items())
    sizes = [
        f" (up to {link.ring_most_bytes // 1024} KiB through shared memory)"
        for link in links.values()
        if isinstance(link, ReadingLink)
    ]
    return f"rank {group.rank} exchanges data through " + ", ".join(told) + "".join(sizes[:1])


# -- the programs of all ranks --------------------------------------------------------------------


def point_out_other_programs(group: Group) -> None:
    """Warn if the ranks do not run the same files."""
    runner = preliminary(group)
    runner.purpose = lambda: "the comparison of programs in init()"
    text = compare_programs(runner, group.hosts)
    if text and group.rank == 0 and group.control is not None:
        group.control.warn("program", text)


_MAX_FILES = 5
_OURS = ("ringcomm", "ringrun")
_INSTALLED = ("site-packages", "dist-packages", "horovod_shim")


def own_files() -> Dict[str, str]:
    """Return hashes of the script and its modules from its own folder, by relative path, without installed
    packages; empty without a script (in a notebook), or where an installed program has imported ringcomm.
    """
    main = sys.modules.get("__main__")
    script = getattr(main, "__file__", None)
    name = getattr(getattr(main, "__spec__", None), "name", None) or ""
    if not script or name.partition(".")[0] in _OURS:
        return {}
    path = Path(script).resolve()
    # `python -m package.train` imports from the folder of the package.
    folder = path.parents[min(name.count("."), len(path.parents) - 1)]
    if is_installed(path):
        return {}
    found: Dict[str, str] = {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if not file or module.__name__.partition(".")[0] in _OURS:
            continue
        path = Path(file).resolve()
        if folder in path.parents and not is_installed(path) and path.is_file():
            content = hashlib.blake2b(path.read_bytes(), digest_size=8)
            found[path.relative_to(folder).as_posix()] = content.hexdigest()
    return found


@lru_cache(maxsize=None)
def _libraries() -> List[Path]:
    return [Path(place).resolve() for place in sysconfig.get_paths().values()]


def is_installed(path: Path) -> bool:
    """Return whether a resolved path belongs to Python or to an installed package."""
    return any(part in _INSTALLED for part in path.parts) or any(
        place in path.parents for place in _libraries()
    )


def compare_programs(runner: Runner, hosts: Sequence[str]) -> str:
    """Compare the programs of all ranks; return a warning, the same on all, or ""."""
    files = own_files()
    payload = np.frombuffer(json.dumps(files, sort_keys=True).encode() if files else b"", np.uint8)
    whole = int.from_bytes(hashlib.blake2b(payload.tobytes(), digest_size=7).digest(), "little")
    mine = [whole if files else 0, payload.size]
    table = runner.exchange(mine, ahead_of(Collective.EXCHANGE, np.dtype(np.int64), "program"))
    if len({number for number in table[:, 0].tolist() if number}) < 2:
        return ""
    bounds = cumulative(table[:, 1])
    gathered = np.empty(bounds[-1], np.uint8)
    gathered[bounds[runner.rank] : bounds[runner.rank + 1]] = payload
    runner.all_gather(gathered, direct_call(Collective.ALLGATHER, gathered, "program", bounds=bounds))
    parts = [gathered[start:stop].tobytes() for start, stop in zip(bounds, bounds[1:])]
    programs = [json.loads(part) if part else {} for part in parts]
    return differences_text(programs, hosts)


def differences_text(programs: Sequence[Dict[str, str]], hosts: Sequence[str]) -> str:
    """Return a warning about files that differ between hosts, by each rank's :func:`own_files`; or ""."""
    texts = [
        text
        for name in sorted({name for program in programs for name in program})
        for text in [_file_text(name, [program.get(name) for program in programs], hosts)]
        if text
    ]
    if not texts:
        return ""
    more = f" ({len(texts) - _MAX_FILES} more files differ)" if len(texts) > _MAX_FILES else ""
    return (
        f"The ranks do not run the same program: {'; '.join(texts[:_MAX_FILES])}{more}. What they compute "
        "may differ although nothing fails. Copy the same files to every host (rsync -a, or a shared "
        "directory)."
    )


def _file_text(name: str, hashes: Sequence[Optional[str]], hosts: Sequence[str]) -> str:
    """Return which ranks have another version of a file than most; "" if none, or they lack it."""
    versions: Dict[str, List[int]] = {}
    for rank, found in enumerate(hashes):
        if found is not None:
            versions.setdefault(found, []).append(rank)
    if len(versions) < 2:
        return ""
    usual, *others = sorted(versions.values(), key=lambda ranks: (-len(ranks), ranks))
    odd = " and ".join(_places(ranks, hosts) for ranks in others)
    return f"{name} on {odd} is not that on {_places(usual, hosts)}"


def _places(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Return text like ``jetson1 (ranks 2, 3)``."""
    by_host: Dict[str, List[int]] = {}
    for rank in ranks:
        by_host.setdefault(hosts[rank], []).append(rank)
    return ", ".join(
        f"{host} (rank{'s' if len(own) > 1 else ''} {', '.join(map(str, own))})"
        for host, own in by_host.items()
    )
