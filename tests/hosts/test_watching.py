"""The host behind a throttled link is the one that the live view and the report name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Callable

import pytest

from tests.hosts.job import ringrun
from tests.hosts.netlab import Lab

PROGRAM = """
import sys, time
import numpy as np
import ringcomm as rc

rc.init()
gradient = np.ones(250_000, np.float32)
until = time.monotonic() + 8.0
while True:
    rc.allreduce_async(gradient, name="gradient").wait() if sys.argv[1] == "name" else rc.allreduce(gradient)
    rc.count_step()
    if rc.allreduce(np.array([time.monotonic() > until], np.int32), op=rc.Max)[0]:
        break
"""


THROTTLED = """
import sys, time
from pathlib import Path
import numpy as np
import ringcomm as rc

rc.init()
group = Path(sys.argv[2])
if rc.rank() == 2:  # after the imports, which would take long
    (group / "cgroup.procs").write_text("0")
data = np.ones(1000, np.float32)
until = time.monotonic() + 8.0
while True:
    began = time.thread_time()
    while time.thread_time() - began < 0.015:  # with 0.05 cores that takes 0.3 s
        data.sum()
    rc.allreduce_async(data, name="gradient").wait() if sys.argv[1] == "name" else rc.allreduce(data)
    rc.count_step()
    if rc.allreduce(np.array([time.monotonic() > until], np.int32), op=rc.Max)[0]:
        break
if rc.rank() == 2:
    (group.parent / "cgroup.procs").write_text("0")
"""


def watched(lab: Lab, folder: Path, hosts: str, program: str, *arguments: object) -> str:
    """The report, after a check that the live view's last line says the same."""
    (folder / "train.py").write_text(program)
    options = ["-H", hosts, "--cwd", folder, "--watch", "--report", folder / "run.html"]
    job = ringrun(lab, *options, "train.py", *arguments, timeout_s=100)
    assert job.process.returncode == 0, job.output
    page = (folder / "run.html").read_text()
    assert re.findall(r"rank (\d) \(\w+\) is the slowest", job.output) == re.findall(
        r"Rank (\d) \(\w+\) is the slowest", page
    ), job.output
    return page


def test_a_throttled_link_marks_the_rank_behind_it(lab: Lab, tmp_path: Path) -> None:
    lab.shape("jetson2", "eth", "60mbit")
    page = watched(lab, tmp_path, "localhost,jetson1,jetson2", PROGRAM, "direct")
    assert "Rank 2 (jetson2) is the slowest: its link over eth0 carries" in page, page
    assert re.search(r"<tr class=slow><td>2</td>", page)
    assert "eth0 to eth0" in page.partition("<h2>Links</h2>")[2]
    fast = re.search(r"<td class=.t.>0 \(localhost\)</td><td class=.t.>1 \(jetson1\)</td>", page)
    assert fast is not None


@pytest.mark.parametrize("way", [pytest.param("direct", marks=pytest.mark.release), "name"])
def test_a_rank_that_its_control_group_throttles_is_the_one_marked(
    lab: Lab, tmp_path: Path, quota: Callable[[float], Path], way: str
) -> None:
    page = watched(lab, tmp_path, "jetson1,jetson2,localhost", THROTTLED, way, quota(0.05))
    assert "Rank 2 (localhost) is the slowest: the others wait for it" in page, page
    assert re.search(r"<tr class=slow><td>2</td>", page)
