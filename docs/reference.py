"""The pages of the API reference: modules, and the names of ``ringcomm`` in the order of their use."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Dict, List, Set

from tests.public_names import public_names

ROOT = Path(__file__).resolve().parents[1]

GROUPS: Dict[str, str] = {
    "Start and end": "init shutdown is_initialized",
    "Ranks": "rank size local_rank local_size cross_rank cross_size is_homogeneous epoch",
    "Collectives": "allreduce allreduce_ allgather allgather_ broadcast broadcast_ reducescatter "
    "reducescatter_ alltoall alltoall_ barrier",
    "Memory that the ranks of a host share": "empty",
    "Several arrays at once": "grouped_allreduce grouped_allreduce_ grouped_allgather grouped_reducescatter",
    "Collectives by name, in the background": "allreduce_async allreduce_async_ allgather_async "
    "broadcast_async broadcast_async_ reducescatter_async alltoall_async grouped_allreduce_async "
    "grouped_allreduce_async_ grouped_allgather_async grouped_reducescatter_async Handle poll "
    "synchronize join",
    "Python objects": "broadcast_object allgather_object",
    "Messages between two ranks": "send recv send_async recv_async",
    "Reductions": "Average Sum Min Max Product Adasum ReduceOp",
    "Process sets": "ProcessSet add_process_set remove_process_set global_process_set",
    "Machines of unequal speed": "balanced advise Advice count_step",
    "Looking into a running job": "stats start_timeline stop_timeline check_same pause",
    "Contexts and settings": "Context Membership Settings __version__",
    "Exceptions": "RingcommError Recoverable Misuse UnknownProcessSetError",
}
"""The sections of the page on ``ringcomm``; the other exceptions stand with their module."""

MODULES = (
    "ringcomm.elastic", "ringcomm.errors", "ringcomm.torch", "ringcomm.torch.elastic",
    "ringcomm.torch.mpi_ops", "ringcomm.torch.distributed", "ringcomm.lightning", "ringcomm.tensorflow",
    "ringcomm.tensorflow.elastic", "ringcomm.tensorflow.mpi_ops",
    "ringcomm.keras", "ringcomm.keras.callbacks",
    "ringcomm.keras.elastic", "ringcomm.mxnet", "ringcomm.mxnet.mpi_ops", "ringcomm.jax", "ringcomm.mlx",
    "ringcomm.ray",
    "ringcomm.dask", "ringcomm.spark", "ringcomm.testing.cluster", "ringcomm.testing.contract",
    "ringcomm.testing.faulty",
)  # fmt: skip
"""The modules with a page of their own, whose public names it describes."""

FIRST = ["init", "rank", "size", "DistributedOptimizer", "broadcast_parameters", "run"]
CONSTANTS = ["Adasum", "Average", "Max", "Min", "Product", "Sum", "global_process_set"]

LAUNCHER = """# rc.run: jobs from Python

`rc.run` starts a job as `ringrun` does, from a script or a notebook
([more](../docs/collectives.md#a-function-as-a-job)); its options are those of the
[command line](../docs/ringrun.md). Scripts for `horovod.run` call the same function:
`ringrun --horovod` puts it there. [Ray, Dask and Spark](../docs/ray_dask_spark.md) have their own functions
([ringcomm.ray](ringcomm.ray.md), [ringcomm.dask](ringcomm.dask.md), [ringcomm.spark](ringcomm.spark.md)).

```python
import ringcomm as rc

results = rc.run(train, args=(0.1,), np=3, hosts="localhost,jetson1,jetson2")
```

"""

LOCAL_STEPS = """# Local steps: LocalSGD

Ranks train alone for some steps and then average their weights: for links that are too slow for every step.
[What it brings and costs](../docs/compression.md). PyTorch's class is
[`ringcomm.torch.LocalSGD`](ringcomm.torch.md#ringcomm.torch.LocalSGD); this one is for NumPy arrays.

"""

QUIET = "      docstring_options: {warnings: false}\n"
"""An attribute has no types of parameters."""


def write_reference(target: Path) -> List[str]:
    """Write the pages into a folder; returns their part of the navigation in YAML."""
    target.mkdir(parents=True, exist_ok=True)
    pages = {
        "ringcomm": page_of_ringcomm(),
        "rc.run": LAUNCHER + described("ringcomm.run") + QUIET,
        "LocalSGD": LOCAL_STEPS + described("ringcomm.LocalSGD") + "      inherited_members: true\n",
    }
    pages.update({module: page_of_module(module) for module in MODULES})
    lines = ["  - API reference:"]
    for name, text in pages.items():
        (target / f"{name}.md").write_text(text)
        lines.append(f"    - {name}: api/{name}.md")
    return lines


def described(name: str, heading: int = 2) -> str:
    """An object's part of a page."""
    return f"::: {name}\n    options:\n      heading_level: {heading}\n      show_root_full_path: false\n"


def page_of_module(module: str) -> str:
    """The page of a module: what programs call first, then in the order of the alphabet, constants last."""
    page = f"# {module}\n\n::: {module}\n    options:\n      show_root_heading: false\n"
    try:
        names = public_names(module)
    except LookupError:  # it has no __all__
        return page
    order = sorted(names, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST),
                                            name in CONSTANTS, name.lower(), name))  # fmt: skip
    return f"{page}      group_by_category: false\n      members: [{', '.join(order)}]\n"


def page_of_ringcomm() -> str:
    """The page of ``ringcomm``, in sections.

    Raises:
        SystemExit: a public name is in no section.
    """
    listed = {name for names in GROUPS.values() for name in names.split()}
    missing = public_names("ringcomm") - listed - exceptions() - {"run", "LocalSGD"}
    if missing:
        raise SystemExit(f"no section of docs.reference.GROUPS has {sorted(missing)}")
    parts = [
        "# ringcomm\n\nThe calls for arrays of NumPy and of other frameworks; what they share is in\n"
        "[Collectives](../docs/collectives.md). [`rc.run`](rc.run.md), [`rc.LocalSGD`](LocalSGD.md) and\n"
        "[`rc.elastic`](ringcomm.elastic.md) have pages of their own.\n\n```python\nimport ringcomm as rc\n\n"
        "rc.init()\ngradient = rc.allreduce(gradient)  # the average over all ranks\n```\n"
    ]
    for title, names in GROUPS.items():
        parts += [f"\n## {title}\n", *(described(f"ringcomm.{name}", 3) for name in names.split())]
    others = sorted(exceptions() - listed)
    parts.append("All others, also in `ringcomm`, are in [ringcomm.errors](ringcomm.errors.md):\n")
    parts += [f"[`{name}`](ringcomm.errors.md#ringcomm.errors.{name})\n" for name in others]
    return "\n".join(parts)


def exceptions() -> Set[str]:
    """The public exceptions."""
    tree = ast.parse((ROOT / "ringcomm" / "errors.py").read_text())
    return {node.name for node in tree.body if isinstance(node, ast.ClassDef)} & public_names("ringcomm")
