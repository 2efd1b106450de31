"""Compares functions with how Horovod's users call them."""

from __future__ import annotations

import inspect
import re
from typing import Any, Dict, List

import ringcomm as rc

DEFAULTS: Dict[str, Any] = {
    "None": (None,), "Average": (rc.Average,), "False": (False,), "True": (True,), "": ("",),
    "global": (rc.global_process_set, None),
}  # fmt: skip
"""What a default stands for in the tables: a process set that is not given is the global one."""

COMMON = """
init(comm=None, process_sets=None)
shutdown()
is_initialized()
start_timeline(file_path, mark_cycles=False)
stop_timeline()
size()
rank()
local_size()
local_rank()
cross_size()
cross_rank()
mpi_threads_supported()
mpi_enabled()
mpi_built()
gloo_enabled()
gloo_built()
nccl_built()
ddl_built()
ccl_built()
cuda_built()
rocm_built()
add_process_set(process_set)
remove_process_set(process_set)
"""
"""What several modules of Horovod have."""


def differences(module: Any, table: str) -> List[str]:
    """Where functions take other parameters than a table says, in another order, or by other defaults.

    Args:
        table: lines like ``broadcast(tensor, root_rank, name=None)``. What comes after these parameters in
            ringcomm's function is its own affair.
    """
    wrong = []
    for line in filter(None, (line.strip() for line in table.splitlines())):
        found = re.fullmatch(r"([\w.]+)\((.*)\)", line)
        assert found, line
        thing = module
        for part in found.group(1).split("."):
            thing = getattr(thing, part)
        has = [item for item in inspect.signature(thing).parameters.values() if item.name != "self"]
        wanted = [item.split("=") for item in found.group(2).split(", ") if item]
        if [item.name for item in has[: len(wanted)]] != [item[0] for item in wanted]:
            wrong.append(f"{line}: is ({', '.join(map(str, has))})")
            continue
        wrong += [
            f"{line}: {item.name}={item.default!r}"
            for item, (_, *default) in zip(has, wanted)
            if default and item.default not in values_of(default[0], module)
        ]
        wrong += [f"{line}: also requires {item.name}" for item in has[len(wanted) :] if required(item)]
    return wrong


def values_of(default: str, module: Any) -> Any:
    if default in DEFAULTS:
        return DEFAULTS[default]
    if default == "none":
        return (module.Compression.none,)
    return (float(default),) if re.fullmatch(r"-?[\d.]+", default) else (default,)


def required(item: inspect.Parameter) -> bool:
    return item.default is item.empty and item.kind not in (item.VAR_KEYWORD, item.VAR_POSITIONAL)
