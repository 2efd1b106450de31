"""A process that reaches PyTorch's store can read and write it. That changes no number and runs no code."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest

dist = pytest.importorskip("torch.distributed")

from ringcomm.storage.keys import key_text, make_certificate  # noqa: E402
from tests.adapters.torch_distributed.forked import Forked  # noqa: E402
from tests.adapters.torch_distributed.harness import meet  # noqa: E402
from tests.support.programs import run_python  # noqa: E402
from tests.support.relay import Relay  # noqa: E402
from tests.support.service import eventually  # noqa: E402

pytestmark = pytest.mark.xdist_group("torch_distributed")  # one server of forks imports PyTorch
ROOT = Path(__file__).resolve().parents[3]
KEY = b"k" * 32
START_S = 3.0
ENTRIES = [f"{start}0//cpu//ringcomm/rendezvous" for start in ("", "default_pg/", "default_pg//")]
"""Where the entry of the group of all ranks is, as versions of PyTorch name it."""


class Open:
    """A store that any process can reach, and two ranks that connect through it."""

    def __init__(self, stack, encrypt, folder):
        self.store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
        self.stack = stack
        self.folder = folder
        self.variables = {
            **os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}", "RINGCOMM_START_TIMEOUT": str(START_S),
            "RINGCOMM_KEY": key_text(KEY, make_certificate() if encrypt else ""),
            "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        }  # fmt: skip

    def start(self, rank):
        errors = self.folder / f"errors.{len(list(self.folder.iterdir()))}"
        process = Forked(meet, (rank, 2, self.store.port), self.variables, errors)
        self.stack.callback(process.close)
        return process

    def entry(self):
        """The entry by which the group meets, as soon as rank 0 has written it."""
        assert eventually(lambda: any(self.store.check([name]) for name in ENTRIES), 60)
        return next(name for name in ENTRIES if self.store.check([name]))


@pytest.fixture
def meeting(tmp_path):
    with ExitStack() as stack:
        yield lambda encrypt=False: Open(stack, encrypt, tmp_path)


def said(process):
    """What it has sent, when it has ended."""
    found = list(process.messages(60.0))
    assert process.end(60.0) == 0, process.errors
    return "\n".join(found)


def endpoints(entry):
    return json.loads(json.loads(entry)["text"])["endpoints"]


def with_other_endpoints(entry, where):
    """The entry, leading elsewhere, with the signature that was there."""
    found = json.loads(entry)
    found["text"] = json.dumps({**json.loads(found["text"]), "endpoints": [where]})
    return json.dumps(found)


@pytest.mark.full
@pytest.mark.parametrize("encrypt", [False, True])
def test_an_entry_that_leads_elsewhere_is_refused(meeting, encrypt):
    here = meeting(encrypt)
    here.start(0)
    name = here.entry()
    written = here.store.get(name)
    assert [address for address, _ in endpoints(written)] == ["127.0.0.1"], "on one host it needs no more"
    with Relay(tuple(endpoints(written)[0])) as relay:
        here.store.set(name, with_other_endpoints(written, relay.at))
        one = said(here.start(1))
        assert relay.came == 0
    assert one.startswith("StartupError") and "is not signed with this job's key" in one, one


OPEN = """
import torch, torch.distributed as dist
import ringcomm.torch.distributed
dist.init_process_group("ringcomm")
ones = torch.ones(3)
dist.all_reduce(ones, group=dist.new_group([0, 1]))
print("sum", ones[0].item(), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.release
def test_torchrun_without_a_key_gives_one_warning(tmp_path):
    (tmp_path / "open.py").write_text(OPEN)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    output = run_python(*torchrun, "open.py", cwd=tmp_path)
    # The ranks share the output: a line may stand inside the other's.
    assert output.count("2.0") == 2, output
    assert output.count("any process that can read or write the store can join") == 1, output


@pytest.mark.full
def test_a_rank_that_reads_an_old_entry_first_reads_the_new_one_later(meeting):
    """One store for two starts: rank 1 comes to the second one before rank 0 does."""
    here = meeting()
    here.variables["RINGCOMM_START_TIMEOUT"] = "60"  # rank 0 may need long to come, on a busy machine
    for turn in range(2):
        first, second = (here.start(rank) for rank in ((1, 0) if turn else (0, 1)))
        assert [said(first), said(second)] == ["sum 2.0", "sum 2.0"]


LISTENS = """
import psutil, torch, torch.distributed as dist
import ringcomm.torch.distributed
dist.init_process_group("ringcomm", init_method={method!r})
pair = dist.new_group([0, 1])
ones = torch.ones(3)
dist.all_reduce(ones, group=pair)
store = dist.distributed_c10d._get_default_store()
while hasattr(store, "underlying_store"):
    store = store.underlying_store
has_keys = type(store) is dist.TCPStore and hasattr(store, "list_keys")
ours = [key for key in (store.list_keys() if has_keys else []) if "ringcomm" in key]
at = {{item.laddr.ip for item in psutil.Process().net_connections() if item.status == "LISTEN"}}
print("found", sorted(at), ours, ones[0].item(), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("method", "encrypt"), [("env://", ()), ("ringcomm://", ("--encrypt",)), ("env://", ("--encrypt",))]
)
def test_under_ringrun_nothing_is_in_the_store_and_it_is_on_the_loopback(tmp_path, method, encrypt):
    """In an encrypted job no rank listens: the launcher has the store, and connects the groups."""
    program = tmp_path / "listens.py"
    program.write_text(LISTENS.format(method=method))
    output = run_python("-m", "ringrun", "-np", 2, *encrypt, program, cwd=tmp_path)
    lines = sorted(line.split("] ", 1)[1] for line in output.splitlines() if "found" in line)
    listens = "found [] [] 2.0" if encrypt else "found ['127.0.0.1'] [] 2.0"
    assert lines == sorted([listens, "found [] [] 2.0"]), output


STORE = """
import datetime, os, torch.distributed as dist
import ringcomm.torch.distributed
dist.init_process_group("ringcomm")
rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
if rank == 0:
    store.set("bytes", bytes(range(256)))
found = [store.get("bytes") == bytes(range(256)), store.add("count", rank + 1) in (1, 2, 3)]
dist.barrier()
found += [store.add("count", 0) == 3, store.get("count") == b"3", store.check(["bytes", "count"])]
found += [not store.check(["bytes", "none"])]
try:
    store.wait(["none"], datetime.timedelta(seconds=0.2))
except RuntimeError as problem:
    found += ["wait timeout" in str(problem)]
dist.barrier()
if rank == 0:
    found += [store.compare_set("once", "", "a") == b"a", store.compare_set("once", "b", "c") == b"a"]
    found += [store.compare_set("once", "a", "b") == b"b", store.delete_key("once")]
    found += [not store.delete_key("once")]
dist.distributed_c10d._store_based_barrier(rank, store, "all", 2, datetime.timedelta(seconds=20))
print("found", all(found), found, flush=True)
dist.destroy_process_group()
"""


def test_the_store_of_an_encrypted_job_is_one_of_pytorch(tmp_path):
    (tmp_path / "store.py").write_text(STORE)
    output = run_python("-m", "ringrun", "-np", 2, "--encrypt", "store.py", cwd=tmp_path)
    assert output.count("found True") == 2, output
