"""Compares functions with how Horovod's users call them, and with the table of options."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, Dict, List, Set, Tuple

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
    """Return where functions differ from a table of ``broadcast(tensor, root_rank, name=None)``."""
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
        return (module.Compression.none, None)
    return (float(default),) if re.fullmatch(r"-?[\d.]+", default) else (default,)


_FORM = re.compile(r"(grouped_)?(allreduce|reducescatter|allgather|broadcast|alltoall|barrier)(_async)?_?")


def table_of_options() -> Tuple[List[str], Dict[str, Tuple[Set[str], List[bool]]]]:
    """The packages in the tables of docs/collectives.md; by function its options, and where it is."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "collectives.md").read_text()
    options = {}
    for name, cell in _rows(text, "| function, in every form |")[1]:
        given, _, without = (set(re.findall(r"`(.*?)`", part)) for part in cell.partition(" except in "))
        options[name] = given, without
    header, rows = _rows(text, "| function | `ringcomm` |")
    packages = ["ringcomm" + name.replace("ringcomm", "") for name in header[1:]]
    table = {}
    for name, *has in rows:
        form = _FORM.fullmatch(name)
        assert form is not None
        given, without = options.get(form[2], (set(), set()))
        own = set() if name in without else given
        table[name] = {"name", "process_set", *own}, [cell == "x" for cell in has]
    return packages, table


def _rows(text: str, start: str) -> Tuple[List[str], List[List[str]]]:
    """Return the cells of the header and of the rows of a table; of a lone `code` without the marks."""
    lines = text[text.index(start) :].partition("\n\n")[0].splitlines()
    header, _, *rows = [
        [re.sub(r"^`([^`]*)`$", r"\1", cell.strip()) for cell in line.strip("|").split("|")] for line in lines
    ]
    return header, rows


def functions_of(package: str) -> List[str]:
    """The functions that the table says a package has."""
    packages, table = table_of_options()
    return [name for name, (_, has) in table.items() if has[packages.index(package)]]


def differences_of_options(module: Any, package: str) -> List[str]:
    """Return which of a package's functions are missing, are not in the table, or lack an option."""
    _, table = table_of_options()
    listed = {name: table[name][0] for name in functions_of(package)}
    found = {name for name in dir(module) if _FORM.fullmatch(name)}
    wrong = [f"{name} is in the table or in the package only" for name in sorted(found ^ set(listed))]
    for name in found & set(listed):
        lacks = listed[name] - set(inspect.signature(getattr(module, name)).parameters)
        if lacks:
            wrong.append(f"{name} lacks {', '.join(sorted(lacks))}")
    return wrong


def required(item: inspect.Parameter) -> bool:
    return item.default is item.empty and item.kind not in (item.VAR_KEYWORD, item.VAR_POSITIONAL)
