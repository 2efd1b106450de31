"""Hosts that have Python 3.8 and nothing else: ringrun sends them ringcomm, and NumPy with --provision."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Dict, List

import pytest

from ringcomm.version import __version__
from ringrun.agent.shipped import SHARED_PLACES
from tests.hosts.job import Job, ringrun
from tests.hosts.netlab import Lab
from tests.proc.test_ringrun_local import _other_python

PROGRAM = """
import numpy as np
import ringcomm as rc

rc.init()
total = rc.allreduce(np.arange(5.0), op=rc.Sum)
print(rc.rank(), "of", rc.size(), total.tolist() == (3 * np.arange(5.0)).tolist(), rc.__file__, flush=True)
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter without pip and without any package."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([_other_python("3.8"), "-m", "venv", "--without-pip", str(folder)], check=True)
    return str(folder / "bin" / "python")


class Boards:
    """Two hosts whose interpreter has separate caches, in `folder`."""

    def __init__(self, folder: Path, python: str) -> None:
        self.folder, self.python = folder, python
        self.places: Dict[str, Dict[str, str]] = {}
        (folder / "train.py").write_text(PROGRAM)
        for host in ("jetson1", "jetson2"):
            self.places[host] = {
                "XDG_CACHE_HOME": str(folder / host / "cache"), "TMPDIR": str(folder / host / "temporary"),
            }

    def options(self) -> List[str]:
        words = ["-H", "localhost,jetson1,jetson2", "--cwd", str(self.folder), "--provision"]
        for host, variables in self.places.items():
            script = self.folder / f"python-{host}"
            assignments = " ".join(f"{name}={value}" for name, value in variables.items())
            script.write_text(f'#!/bin/sh\n{assignments} exec {self.python} "$@"\n')
            script.chmod(0o755)
            words += ["--python", f"{host}={script}"]
        return words

    def run(self, lab: Lab, *more: str) -> Job:
        job = ringrun(lab, *self.options(), *more, "train.py", module_path=False, timeout_s=150)
        assert "Traceback" not in job.output, job.output
        return job

    def trained(self, job: Job) -> None:
        assert sorted(job.values(r"\] (\d of 3 True)")) == ["0 of 3 True", "1 of 3 True", "2 of 3 True"], (
            job.output
        )


@pytest.fixture
def boards(bare: str, tmp_path: Path) -> Boards:
    return Boards(tmp_path, bare)


@pytest.mark.timeout(300)
def test_a_bare_python_trains_and_the_second_start_sends_nothing(lab: Lab, boards: Boards) -> None:
    job = boards.run(lab)
    boards.trained(job)
    for host in boards.places:
        assert f"sending ringcomm {__version__} to {host}" in job.output
        assert len(job.values(rf"^ringrun: sending numpy [^,]* to {host}")) == 1
    again = boards.run(lab)
    boards.trained(again)
    assert "sending" not in again.output


@pytest.mark.release
@pytest.mark.timeout(300)
def test_a_read_only_home_and_a_full_disk(lab: Lab, boards: Boards) -> None:
    boards.places["jetson1"]["XDG_CACHE_HOME"] = "/proc/nowhere"
    temporary = boards.folder / "jetson1" / "temporary" / f"ringcomm-{os.getuid()}"
    own = Path(boards.places["jetson2"]["XDG_CACHE_HOME"]) / "ringcomm"
    shared = [Path(place) / f"ringcomm-{os.getuid()}" for place in SHARED_PLACES]
    kept = [place for place in shared if place.exists()]
    full = [own, Path(boards.places["jetson2"]["TMPDIR"]) / f"ringcomm-{os.getuid()}", *shared]
    try:
        for place in full:
            lab.run("jetson2", ["mkdir", "-p", str(place)])
            lab.run("jetson2", ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "none", str(place)])
        job = boards.run(lab)
    finally:
        for place in full:
            lab.run("jetson2", ["umount", str(place)])
        for place in set(shared) - set(kept):
            if place.is_dir():
                place.rmdir()
    assert job.process.returncode == 1
    for word in ["│ jetson2: ", "No space left on device", str(own)]:
        assert word in job.output, job.output
    assert "│ jetson1" not in job.output
    assert len(list(temporary.iterdir())) >= 1
    boards.trained(boards.run(lab))


@pytest.mark.release
def test_an_environment_of_conda_is_found_by_its_name(lab: Lab, tmp_path: Path) -> None:
    """This machine has it in one folder, and the hosts in another."""
    here = tmp_path / "miniconda3" / "envs" / "train"
    venv.create(here, with_pip=False)
    (here / "conda-meta").mkdir()
    (site,) = here.glob("lib/python*/site-packages")
    (site / "here.pth").write_text("".join(f"{path}\n" for path in sys.path if path.endswith("packages")))
    (tmp_path / "train.py").write_text(f"{PROGRAM}\nimport sys\nprint(sys.prefix, flush=True)\n")
    (tmp_path / "opt" / "conda" / "envs").mkdir(parents=True)
    shutil.copytree(here, tmp_path / "opt" / "conda" / "envs" / "train", symlinks=True)
    (tmp_path / "empty").mkdir()
    hosts = ("jetson1", "jetson2")
    mounts = [(tmp_path / "empty", here), (tmp_path / "opt", Path("/opt"))]
    try:
        for host in hosts:
            for source, target in mounts:
                lab.run(host, ["mount", "--bind", str(source), str(target)])
        words = ["-H", "localhost,jetson1,jetson2", "--cwd", tmp_path, "train.py"]
        with Job(lab, *words, python=str(here / "bin" / "python"), module_path=False) as job:
            assert job.finish(150) == 0, job.output
    finally:
        for host in hosts:
            for _, target in mounts:
                lab.run(host, ["umount", str(target)])
    for host in hosts:
        assert f"{host} has no {here}/bin/python: its environment is looked for there" in job.output
        assert f"{host}: the ranks run /opt/conda/envs/train/bin/python" in job.output
    prefixes = [str(here), "/opt/conda/envs/train", "/opt/conda/envs/train"]
    assert sorted(job.values(r"\] (/\S+)$")) == sorted(prefixes), job.output


@pytest.mark.timeout(300)
def test_the_code_is_sent_and_results_come_back(lab: Lab, tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "scripts").mkdir(parents=True)
    (project / "empty").mkdir()
    first, second = time.time_ns(), time.time_ns() + 1  # contents that no cache has
    (project / "helper.py").write_text(f"VALUE = {first}\n")
    (project / "large.bin").write_bytes(bytes(1_000_000))
    (project / ".ringignore").write_text("large.bin\n")
    (project / "scripts" / "train.py").write_text(
        "import os, sys\nsys.path.insert(0, '..')\nimport helper, ringcomm as rc\nrc.init()\n"
        "os.makedirs('../out', exist_ok=True)\n"
        "open(f'../out/rank{rc.rank()}', 'w').write(str(helper.VALUE))\n"
        "rc.rank() and open(f'../empty/of{rc.rank()}', 'w').close()\n"
        "print('in', os.getcwd(), os.path.exists('../large.bin'), flush=True)\n"
    )
    words = ["-H", "localhost,jetson1,jetson2", f"--ship={project}", "--fetch", "out", "train.py"]
    with Job(lab, *words, cwd=project / "scripts") as job:
        assert job.finish(120) == 0, job.output
    assert f"[localhost:0] in {project}/scripts True" in job.output
    # They share a home.
    assert job.values(r"^ringrun: sent (\d) of 3 files to jetson[12], .* leaves out large.bin$"), job.output
    for rank, host in enumerate(("jetson1", "jetson2"), 1):
        (line,) = job.values(rf"^\[{host}:{rank}\] in (.*)$")
        assert line.endswith("/scripts False") and not line.startswith(str(project))
        fetched = project / "scripts" / "fetched" / host / "out"
        assert [file.name for file in fetched.iterdir()] == [f"rank{rank}"]
        assert (fetched / f"rank{rank}").read_text() == str(first)
    (project / "helper.py").write_text(f"VALUE = {second}\n")
    with Job(lab, *words, cwd=project / "scripts") as job:
        assert job.finish(120) == 0, job.output
    sent = job.values(r"^ringrun: sent (\d) of 4 files to jetson[12]")  # the helper, and what rank 0 wrote
    assert sent[:1] == ["2"], job.output
    assert (project / "scripts" / "fetched" / "jetson1" / "out" / "rank1").read_text() == str(second)
    words[-1] = str(project / "scripts" / "train.py")  # the hosts have it elsewhere
    with Job(lab, *words, cwd=project / "scripts") as job:
        assert job.finish(120) == 0, job.output
    shutil.rmtree(project / "scripts" / "fetched")
    with Job(lab, "--min-np", "2", *words, cwd=project / "scripts") as job:
        assert job.finish(120) == 0, job.output
    assert {*job.values(r"^ringrun: fetched \d+ files?, .* from (jetson\d) into")} == {"jetson1", "jetson2"}
    assert (project / "scripts" / "fetched" / "jetson1" / "out").is_dir()
