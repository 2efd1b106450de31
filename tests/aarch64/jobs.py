"""Jobs in which hosts of aarch64 take part."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Dict

from tests.hosts.job import ROOT, Job
from tests.hosts.netlab import Lab

THREE = "localhost,jetson1,jetson2"
NUMPYS = ("--python", "jetson1=/opt/numpy1/bin/python", "--python", "jetson2=/opt/numpy2/bin/python")


def finished(lab: Lab, project: Path, *arguments: Any) -> Job:
    """A job that has ended well. ringrun sends the folder, and ringcomm."""
    with Job(lab, "--ship", *arguments, module_path=False, cwd=project) as job:
        assert job.finish(240) == 0, job.output
    return job


def launcher_environment(lab: Lab) -> Dict[str, str]:
    """The environment in which ringrun reaches the hosts."""
    return {**os.environ, **lab.environ(), "PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}"}
