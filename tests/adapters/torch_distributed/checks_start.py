"""Ways for processes to find each other."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ringcomm.torch.distributed._group import backend_of
from tests.adapters.torch_distributed.harness import Ranks

LIMIT = timedelta(seconds=60)


def works(size: int) -> None:
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert bool((tensor == size).all()) and dist.get_backend() == "ringcomm"


def check_one_store_for_several_jobs(on: Ranks) -> None:
    """One after another, as after a failure; by way of an explicit store."""
    dist.destroy_process_group()
    store = dist.FileStore(f"{os.environ['CHECKS_FOLDER']}/again", on.size)
    for _ in range(3):
        dist.init_process_group("ringcomm", store=store, rank=on.rank, world_size=on.size, timeout=LIMIT)
        works(on.size)
        dist.destroy_process_group()


def check_tcp_and_a_key(on: Ranks) -> None:
    port = dist.TCPStore("127.0.0.1", 0, 1, True) if on.rank == 0 else None
    where = dist.FileStore(f"{os.environ['CHECKS_FOLDER']}/port", on.size)
    if port is not None:
        number, port = port.port, None  # free by now
        where.set("port", str(number))
    number = int(where.get("port"))
    os.environ["RINGCOMM_KEY"] = "0123456789abcdef" * 4
    dist.init_process_group(
        "ringcomm", init_method=f"tcp://127.0.0.1:{number}", rank=on.rank, world_size=on.size, timeout=LIMIT
    )
    works(on.size)
    entry = dist.group.WORLD.get_group_store().get("ringcomm/rendezvous")
    assert b"endpoints" in entry and b"key" not in entry
    dist.destroy_process_group()
    del os.environ["RINGCOMM_KEY"]


def check_by_device(on: Ranks) -> None:
    store = dist.FileStore(f"{os.environ['CHECKS_FOLDER']}/device", on.size)
    dist.init_process_group("cpu:ringcomm", store=store, rank=on.rank, world_size=on.size, timeout=LIMIT)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert bool((tensor == on.size).all())
    group = dist.new_group(backend="ringcomm")
    dist.barrier(group=group)

    dist.destroy_process_group()
    both = dist.PrefixStore("both", store)
    dist.init_process_group(
        "cpu:ringcomm,cuda:gloo", store=both, rank=on.rank, world_size=on.size, timeout=LIMIT
    )
    mesh = init_device_mesh("cpu", (on.size,))
    for number, own in enumerate((dist.group.WORLD, mesh.get_group(), dist.new_group())):
        tensor = torch.full((3,), float(number))
        dist.all_reduce(tensor, group=own)
        assert tensor.tolist() == [float(on.size * number)] * 3 and backend_of(own) is not None


def check_leaving_without_a_word(on: Ranks) -> None:
    """The program ends without a call of destroy_process_group()."""
    dist.new_group(backend="ringcomm")
