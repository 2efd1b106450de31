"""The backend in programs that do not import ringcomm."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distribution

from ringrun.ship.package import _metadata

PROGRAM = """
import sys
import torch
assert not any(name.partition(".")[0] == "ringcomm" for name in sys.modules), "import torch is not cheap"
import torch.distributed as dist
dist.init_process_group("ringcomm", init_method="ringcomm://")
assert dist.get_backend() == dist.Backend.RINGCOMM == "ringcomm"
one = torch.ones(1)
dist.all_reduce(one)
assert one.item() == 1.0
dist.destroy_process_group()
"""


def test_the_backend_needs_no_import() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr


def test_what_is_sent_has_the_entry_point_of_an_installation() -> None:
    wanted = {(item.group, item.value) for item in distribution("ringcomm").entry_points}
    sent = dict(_metadata())
    text = next(data.decode() for name, data in sent.items() if name.endswith("entry_points.txt"))
    value = text.splitlines()[1].partition(" = ")[2]
    assert ("torch.backends", value) in wanted
