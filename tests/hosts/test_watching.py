"""The host behind a throttled link is the one that the live view and the report name."""

from __future__ import annotations

import re
from pathlib import Path

from tests.hosts.job import ringrun
from tests.hosts.netlab import Lab

PROGRAM = """
import time
import numpy as np
import ringcomm as rc

rc.init()
gradient = np.ones(250_000, np.float32)
until = time.monotonic() + 8.0
while True:
    rc.allreduce(gradient)
    rc.count_step()
    if rc.allreduce(np.array([time.monotonic() > until], np.int32), op=rc.Max)[0]:
        break
"""


def test_a_throttled_link_marks_the_rank_behind_it(lab: Lab, tmp_path: Path) -> None:
    lab.shape("jetson2", "eth", "60mbit")
    (tmp_path / "train.py").write_text(PROGRAM)
    options = ["--cwd", tmp_path, "--watch", "--report", tmp_path / "run.html"]
    job = ringrun(lab, "-H", "localhost,jetson1,jetson2", *options, "train.py", timeout_s=100)
    assert job.process.returncode == 0, job.output
    page = (tmp_path / "run.html").read_text()
    assert re.findall(r"rank (\d) \(\w+\) is the slowest", job.output) == ["2"], job.output
    assert "Rank 2 (jetson2) is the slowest: its link over eth0 carries" in page, page
    assert re.search(r"<tr class=slow><td>2</td>", page)
    assert "eth0 to eth0" in page.partition("<h2>Links</h2>")[2]
    assert re.search(r"<td class=.t.>0 \(localhost\)</td><td class=.t.>1 \(jetson1\)</td>", page)
