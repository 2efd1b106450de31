"""``horovod.run``: runs a function as a job."""

from __future__ import annotations

import inspect
import warnings
from typing import Any, Callable, List, Mapping, Optional, Sequence

from ringrun.plan.options import argument, described, table, with_options

_OPTIONS = {option.horovod: (item, option) for item, option in table() if option.horovod}
_OTHERS = {
    "start_timeout": "seconds until all hosts must be ready; also the time limit of ``init`` on the ranks.",
    "disable_cache": "has no effect.",
    "reset_limit": "has no effect.",
    "cooldown_range": "has no effect.",
    "use_gloo": "has no effect.",
    "use_mpi": "must not be set.",
    "mpi_args": "must not be set.",
    "network_interface": "deprecated name of ``network_interfaces``.",
    "np": "deprecated name of ``num_proc``.",
    "min_np": "deprecated name of ``min_num_proc``.",
    "max_np": "deprecated name of ``max_num_proc``.",
}
"""Horovod's arguments that are not in ringrun's table of options, with their descriptions."""
_ORDER = (
    "num_proc", "min_num_proc", "max_num_proc", "slots", "reset_limit", "cooldown_range", "hosts", "hostfile",
    "host_discovery_script", "start_timeout", "ssh_port", "ssh_identity_file", "disable_cache",
    "output_filename", "verbose", "use_gloo", "use_mpi", "mpi_args", "network_interface",
    "network_interfaces", "executable", "np", "min_np", "max_np",
)  # fmt: skip
"""Horovod's order of its arguments, because programs may give them by position."""


def _parameter(name: str) -> inspect.Parameter:
    """Return one of Horovod's arguments; its default is None, except for ``num_proc``, which has 1."""
    if name in _OPTIONS:
        made = argument(_OPTIONS[name][0], name)
    else:
        made = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation="Any")
    made = made.replace(default=1, annotation="int") if name == "num_proc" else made
    return made.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _horovods_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: give a function Horovod's arguments, in its order, and their descriptions."""
    names = [*_ORDER, *(name for name in _OPTIONS if name not in _ORDER)]
    own = list(inspect.signature(function).parameters.values())[:3]
    signature = inspect.Signature([*own, *map(_parameter, names)], return_annotation="List[Any]")
    rows = [described(name, _OPTIONS[name][1]) if name in _OPTIONS else f"{name}: {_OTHERS[name]}"
            for name in names]  # fmt: skip

    def run(*given: Any, **named: Any) -> Any:
        found = signature.bind(*given, **named)
        found.apply_defaults()
        return function(**found.arguments)

    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__doc__ = with_options(function.__doc__, rows)
    return run


@_horovods_arguments
def run(
    func: Callable[..., Any], args: Sequence[Any] = (), kwargs: Optional[Mapping[str, Any]] = None,
    **given: Any,
) -> List[Any]:  # fmt: skip
    """Call a function on every rank, as ``ringcomm.run`` does.

    Args:
        func: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        {options}

    Returns:
        What the function returned on each rank, in rank order; of an elastic job with ``min_num_proc`` on so
        many ranks.

    Raises:
        ValueError: two arguments exclude each other.
        NotImplementedError: an argument belongs to MPI.
        RuntimeError: a rank failed, or the job did not start; the text begins as Horovod's does, and
            ``__cause__`` is the :class:`ringcomm.RemoteError`.
    """
    from ringcomm.errors import RemoteError
    from ringrun.function import run as run_function

    if given["hosts"] is not None and given["hostfile"] is not None:
        raise ValueError("Argument hosts and hostfile only allow one provided.")
    if given["use_gloo"] and given["use_mpi"]:
        raise ValueError("Argument use_gloo and use_mpi only allow one set True.")
    if given["use_mpi"] or given["mpi_args"]:
        raise NotImplementedError("horovod.run has no MPI with ringcomm: leave out use_mpi and mpi_args.")
    for name, old in (("num_proc", "np"), ("min_num_proc", "min_np"), ("max_num_proc", "max_np")):
        if given[old] is not None:
            warnings.warn(f"{old} is deprecated, use {name} instead", DeprecationWarning, stacklevel=3)
            given[name] = given[old]
    interfaces = given["network_interfaces"] or given["network_interface"]
    listed = isinstance(interfaces, (list, tuple, set))
    given["network_interfaces"] = ",".join(interfaces) if listed else interfaces
    given["verbose"] = bool(given["verbose"])
    options = {option.argument: given[name] for name, (_, option) in _OPTIONS.items()}
    try:
        results = run_function(
            func, args, kwargs, start_timeout_s=given["start_timeout"], horovod=True, **options
        )
    except RemoteError as problem:
        raise RuntimeError(f"{_failed(problem.rank)}{problem}") from problem
    fewest = given["min_num_proc"]
    is_elastic = fewest is not None or given["host_discovery_script"] is not None
    return results[: fewest or given["num_proc"]] if is_elastic else results


def _failed(rank: Optional[int]) -> str:
    """Return the beginning of Horovod's text on a failed rank, for which programs search."""
    if rank is None:
        return ""  # the job did not start
    return (
        "Horovod detected that one or more processes exited with non-zero status, thus causing the job to be "
        f"terminated. The first process to do so was:\nProcess name: {rank}\n"
    )
