"""Sends hosts the packages they request: ringcomm, wheels with ``--provision``, files with ``--ship``."""

from __future__ import annotations

import threading
import zipfile
from typing import Any, Callable, Dict, List, Mapping, Tuple

from ringcomm.errors import ConfigError

from ..agent import framing
from ..agent.checks import PROVISIONED
from ..plan.job import HostJob
from ..ship.package import Package, own_package
from ..ship.source_tree import describe_sent
from ..ship.wheels import Target, fetch_wheels
from .agents import Agents
from .event_loop import Loop

Wanted = Tuple[Target, Tuple[str, ...]]
"""The target of wheels, and the packages."""


class Supply:
    """The packages of one job, and those that each host uses now. `problem` is called with a host that cannot
    get its packages, and a text.
    """

    def __init__(
        self, agents: Agents, loop: Loop, say: Callable[[str], None], problem: Callable[[HostJob, str], None]
    ) -> None:
        self._agents, self._loop, self._print, self._problem = agents, loop, say, problem
        self._wheels: Dict[int, Package] = {}  # by host: the package that it uses after ringcomm's
        self._waiting: Dict[Wanted, List[HostJob]] = {}  # hosts whose wheels are being downloaded

    def send(self, host: HostJob, facts: Mapping[str, Any]) -> None:
        """Send a host what its agent's ``lacks`` event names: ``files`` by digest, or else its package."""
        tree = self._agents.job.tree
        if "files" in facts and tree is not None:
            sent = Package("files", tree.contents(facts["files"]))
            counts = len(facts["files"]), len(tree.files), len(sent.archive)
            self._print(describe_sent(host.name, counts, tree.ignored))
            self._agents.send_archive(host, framing.CODE, sent.archive)
            return
        package = self._wheels.get(host.index) or own_package()
        self._print(f"sending {package.name} to {host.name} ({len(package.archive) / 1e6:.1f} MB)")
        self._agents.send_archive(host, framing.PACKAGE, package.archive)

    def provision(self, host: HostJob, facts: Mapping[str, Any]) -> None:
        """Download the wheels of an agent's ``needs`` event in a thread, once for all equal hosts, and have
        the host use them.
        """
        version = str(facts["found"].get("version", "")).rpartition(".")[0]
        lacks = facts["found"].get("lacks", PROVISIONED)
        target = Target(version, facts["machine"], facts["glibc"])
        wanted = target, tuple(name for name in PROVISIONED if name in lacks)
        if wanted in self._waiting:
            self._waiting[wanted].append(host)
            return
        self._waiting[wanted] = [host]
        threading.Thread(target=self._download, args=(wanted,), daemon=True).start()

    def waits_for(self, host: HostJob) -> str:
        """Return the packages whose wheels are being downloaded for a host, or ""."""
        found = (names for (_, names), hosts in self._waiting.items() if host in hosts)
        return " and ".join(next(found, ()))

    def _download(self, wanted: Wanted) -> None:
        target, names = wanted
        try:
            package, lines = fetch_wheels(target, names=names)
        except (ConfigError, OSError, zipfile.BadZipFile) as problem:
            text = str(problem)
            self._loop.call(lambda: self._not_downloaded(wanted, text))
        else:
            self._loop.call(lambda: self._downloaded(wanted, package, lines))

    def _not_downloaded(self, wanted: Wanted, text: str) -> None:
        for host in self._waiting.pop(wanted):
            self._problem(host, f"{host.name}: {text}")

    def _downloaded(self, wanted: Wanted, package: Package, lines: List[str]) -> None:
        hosts = self._waiting.pop(wanted)
        if lines:
            self._print(f"wheels for {', '.join(host.name for host in hosts)}: {'; '.join(lines)}")
        for host in hosts:
            self._wheels[host.index] = package
            self._agents.send(host, {"do": "use", "package": package.digest})
