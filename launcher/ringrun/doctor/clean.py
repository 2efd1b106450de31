"""``ringrun clean``: removes leftovers of jobs, on this machine and on hosts."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Dict, List, Mapping, Optional, Tuple

from ..agent import shipped
from ..job.launch import HostMaker, per_host, read_hosts
from ..plan.command import parse_command
from ..plan.hosts import HostSpec
from ..plan.job import HostJob
from ..plan.options import Options
from ..plan.ranks import PlannedHost
from ..reach.base import AT_ONCE, SshOptions
from ..reach.doors import Doors
from ..reach.named_hosts import list_names, with_lists
from ..show.visible import visible_line
from .hosts import HostProbe

ANSWER_LIMIT_S = 600.0
"""A host may have many files to remove."""


def clean_hosts(options: Options, dry_run: bool) -> Tuple[str, int]:
    """Clean this machine and the hosts of the options, or of all lists; return the text and the exit code."""
    hosts = _hosts(options)
    lines = _lines("this machine", shipped.Cleaning(os.environ, dry_run).run(), dry_run)
    code = 0
    # Made here, and not by the threads: see HostProbe.
    probes = [HostProbe(host, shipped) for host in hosts]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for probe, answer in zip(probes, pool.map(lambda probe: _ask(probe, dry_run), probes)):
            if answer is None:
                lines.append(f"{probe.problem}")
                code = 1
            else:
                lines += _lines(probe.host.name, answer, dry_run)
    return "\n".join(lines), code


def _hosts(options: Options) -> List[HostJob]:
    """Return the hosts other than this machine."""
    specs = read_hosts(options) or with_lists([HostSpec(name) for name in list_names(os.environ)], os.environ)
    specs = list({spec.target.lower(): spec for spec in specs}.values())
    pythons = per_host("--python", options.python, [spec.name for spec in specs])
    ssh = SshOptions(options.ssh, options.ssh_port, options.ssh_identity_file)
    doors = Doors(options.via, ssh, None)
    by_host: Mapping[str, Mapping[Optional[str], str]] = {"python": pythons, "cwd": {}, "iface": {}}
    maker = HostMaker(parse_command(["true"]), os.environ, doors, by_host, ship_self=False)
    local = doors.find_local(specs)
    others = [spec for spec, is_local in zip(specs, local) if not is_local]
    return [maker.make(index, PlannedHost(spec, 1, 1), False) for index, spec in enumerate(others)]


def _ask(probe: HostProbe, dry_run: bool) -> Any:
    try:
        probe.start()
        return probe.ask(ANSWER_LIMIT_S, do="clean", dry_run=dry_run)
    finally:
        probe.end()


def _lines(host: str, answer: Dict[str, Any], dry_run: bool) -> List[str]:
    """Return the lines about a host, whose texts may be long or have control characters."""
    verb = "would remove" if dry_run else "removed"
    total = sum(size for _, _, size in answer["removed"])
    found = [f"{host}: {verb} {_size(total)}" if answer["removed"] else f"{host}: nothing to remove"]
    found += [f"  {what}  {path}  {_size(size)}" for what, path, size in answer["removed"]]
    found += [f"  kept  {path}: {why}" for path, why in answer["kept"]]
    return [visible_line(line) for line in found]


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB" if size_bytes >= 1e5 else f"{size_bytes / 1e3:.1f} KB"
