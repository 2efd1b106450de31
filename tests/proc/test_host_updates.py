"""Programs that look for changes of the hosts themselves, as Horovod's elastic scripts do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.proc.test_elastic_launcher_jobs import script
from tests.proc.test_ringrun_support import Launched

PROGRAM = """
import sys, time
import horovod.torch as hvd
import torch

folder = sys.argv[1]


class State(hvd.elastic.TorchState):
    def on_hosts_updated(self, timestamp, update_res):
        super().on_hosts_updated(timestamp, update_res)
        print("heard", update_res, flush=True)


def until(found, what):
    end = time.monotonic() + 60
    while not found():
        if time.monotonic() > end:
            raise SystemExit(f"no {what}")
        time.sleep(0.01)


@hvd.elastic.run
def train(state):
    print("size", hvd.size(), flush=True)
    if hvd.size() == 2:
        open(f"{folder}/more", "w").close()  # a third slot from now on
        # No commit meanwhile: what is added is heard of in the queue.
        until(lambda: not state._host_messages.empty(), "message")
        print("found", flush=True)
        while True:
            state.commit()
            time.sleep(0.01)
    hvd.allreduce(torch.ones(1), name="last")


hvd.init()
model = torch.nn.Linear(1, 1)
train(State(model=model, step=0))
print("done", flush=True)
"""


@pytest.mark.full
def test_a_message_comes_from_the_thread_that_receives_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    found = script(tmp_path / "hosts", f"echo localhost:$([ -e {tmp_path}/more ] && echo 3 || echo 2)")
    done = Launched(
        "--horovod", "-np", "2", "--min-np", "2", "--host-discovery-script", found,
        sys.executable, "train.py", str(tmp_path), cwd=tmp_path,
    )  # fmt: skip
    assert done.finish(120.0) == 0, done.err
    assert done.out.count("found") == 2 and done.out.count("done") == 3, done.out
    assert done.out.count("heard 2") >= 2 and done.out.count("size 3") == 3, done.out
