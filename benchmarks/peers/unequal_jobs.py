"""Jobs of ranks with CPU quotas, in processes of this machine or on hosts of namespaces with shaped links."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Union

from peers.quotas import Groups, join

ROOT = Path(__file__).resolve().parents[2]
RANK = Path(__file__).with_name("unequal_rank.py")
_LIMIT_S = 300.0


class Work(NamedTuple):
    """What a job computes and reduces per step; a sample takes ``passes`` times some 4 microseconds."""

    global_batch: int = 96
    passes: int = 800
    gradient_bytes: int = 256 * 1024


class Run(NamedTuple):
    """What a job has measured.

    Attributes:
        times: seconds of each step, by rank.
        computed: seconds of computing of each step, by rank.
        shares: of each step.
        lines: what ringrun has said about shares.
    """

    times: List[List[float]]
    computed: List[List[float]]
    shares: List[List[int]]
    lines: List[str]


class Machines:
    """Ranks with quotas; make it with :func:`processes` or :func:`hosts`.

    Args:
        groups: a control group for each.
        names: of the hosts; None: processes of this machine.
        environ: of ringrun.
    """

    def __init__(self, groups: Groups, names: Optional[Sequence[str]], environ: Dict[str, str]) -> None:
        self._groups = groups
        self._names = names
        self._environ = {**environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}"}

    def train(
        self,
        chosen: Sequence[int],
        speeds: Union[str, Sequence[float]],
        steps: int,
        work: Work,
    ) -> Run:
        """A job of some of the machines."""
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            done = self._ringrun(chosen, speeds, steps, work, result)
            rows = json.loads(result.read_text())
        lines = re.findall(r"ringrun: (.*(?:->|waited).*)", done)
        return Run(rows["times"], rows["computed"], rows["shares"], lines)

    def _ringrun(
        self,
        chosen: Sequence[int],
        speeds: Union[str, Sequence[float]],
        steps: int,
        work: Work,
        result: Path,
    ) -> str:
        words = [speeds] if isinstance(speeds, str) else [f"{speed:g}" for speed in speeds]
        command = [sys.executable, "-m", "ringrun", "-np", str(len(chosen)), "--threads", "1"]
        if self._names is not None:
            command += ["-H", ",".join(self._names[number] for number in chosen), "-x", "PYTHONPATH"]
        command += [str(RANK), "--result", str(result)]
        if self._names is None:
            command += ["--groups", *(self._groups.places[number] for number in chosen)]
        command += ["--speeds", *words, "--steps", str(steps), "--global-batch", str(work.global_batch)]
        command += ["--passes", str(work.passes), "--gradient-bytes", str(work.gradient_bytes)]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=self._environ, timeout=_LIMIT_S,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"the job has failed ({done.returncode}):\n{done.stdout}")
        return done.stdout


@contextlib.contextmanager
def processes(quotas: Sequence[float]) -> Iterator[Machines]:
    """Processes of this machine with these parts of a core."""
    with Groups(quotas) as groups:
        yield Machines(groups, None, dict(os.environ))


@contextlib.contextmanager
def hosts(names: Sequence[str]) -> Iterator[Any]:
    """A laboratory of hosts of namespaces."""
    sys.path.insert(0, str(ROOT))
    from tests.hosts.netlab import Lab

    reason = Lab.unavailable()
    if reason is not None:
        raise SystemExit(f"cannot make hosts here: {reason}")
    with Lab(*names, no_wlan=True, docker=False) as lab:
        yield lab


@contextlib.contextmanager
def on_hosts(lab: Any, quotas: Sequence[float], rates: Sequence[str]) -> Iterator[Machines]:
    """Ranks on the hosts of a laboratory with these parts of a core, and links of these rates ("1gbit")."""
    names = [host.name for host in lab.hosts]
    for name, rate in zip(names, rates):
        lab.shape(name, "eth", rate, burst="256kb")
    with Groups(quotas) as groups:
        for name, place in zip(names, groups.places):
            join(place, lab.first_process(name))
        yield Machines(groups, names, lab.environ())


def settled(values: Sequence[float]) -> List[float]:
    """The second half of a job's steps."""
    return list(values[len(values) // 2 :])
