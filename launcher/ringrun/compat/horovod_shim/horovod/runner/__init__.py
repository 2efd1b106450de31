"""``horovod.run``: runs a function as a job."""

from __future__ import annotations

import warnings
from typing import Any, Callable, List, Mapping, Optional, Sequence, Tuple


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Optional[Mapping[str, Any]] = None,
    num_proc: int = 1,
    min_num_proc: Optional[int] = None,
    max_num_proc: Optional[int] = None,
    slots: Optional[int] = None,
    reset_limit: Optional[int] = None,
    cooldown_range: Optional[Tuple[float, float]] = None,
    hosts: Optional[str] = None,
    hostfile: Optional[str] = None,
    host_discovery_script: Optional[str] = None,
    start_timeout: Optional[float] = None,
    ssh_port: Optional[int] = None,
    ssh_identity_file: Optional[str] = None,
    disable_cache: Optional[bool] = None,
    output_filename: Optional[str] = None,
    verbose: Optional[bool] = None,
    use_gloo: Optional[bool] = None,
    use_mpi: Optional[bool] = None,
    mpi_args: Optional[str] = None,
    network_interface: Optional[str] = None,
    network_interfaces: Any = None,
    executable: Optional[str] = None,
    np: Optional[int] = None,
    min_np: Optional[int] = None,
    max_np: Optional[int] = None,
) -> List[Any]:
    """Call a function on every rank, as ``ringcomm.run`` does.

    Args:
        func: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        num_proc: number of ranks; of an elastic job the number of slots that it needs to start.
        min_num_proc: fewest ranks of an elastic job; it makes the job elastic.
        max_num_proc: most ranks of an elastic job.
        slots: of an elastic job: slots of hosts without a number.
        reset_limit: of an elastic job: how often the ranks may change.
        cooldown_range: of an elastic job: shortest and longest exclusion of a host that failed, in seconds.
        hosts: the hosts with their slots, like ``"localhost,jetson1:2"``.
        hostfile: a file with the hosts.
        host_discovery_script: a command that prints the available hosts; it makes the job elastic.
        start_timeout: seconds until all hosts must be ready; also the time limit of ``init`` on the ranks.
        ssh_port: the ssh port on all hosts.
        ssh_identity_file: the private key for ssh.
        disable_cache: has no effect.
        output_filename: directory to which the output of ranks is written, too.
        verbose: log the job's progress.
        use_gloo: has no effect.
        use_mpi: must not be set.
        mpi_args: must not be set.
        network_interface: deprecated name of ``network_interfaces``.
        network_interfaces: the interfaces to use: a list, or text with commas.
        executable: the Python interpreter of the ranks.
        np: deprecated name of ``num_proc``.
        min_np: deprecated name of ``min_num_proc``.
        max_np: deprecated name of ``max_num_proc``.

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
    from ringrun.function import run_function

    if hosts is not None and hostfile is not None:
        raise ValueError("Argument hosts and hostfile only allow one provided.")
    if use_gloo and use_mpi:
        raise ValueError("Argument use_gloo and use_mpi only allow one set True.")
    if use_mpi or mpi_args:
        raise NotImplementedError("horovod.run has no MPI with ringcomm: leave out use_mpi and mpi_args.")
    for name, old, value in (
        ("num_proc", "np", np), ("min_num_proc", "min_np", min_np), ("max_num_proc", "max_np", max_np),
    ):  # fmt: skip
        if value is not None:
            warnings.warn(f"{old} is deprecated, use {name} instead", DeprecationWarning, stacklevel=2)
    fewest = min_num_proc if min_np is None else min_np
    interfaces = network_interfaces or network_interface
    try:
        results = run_function(
            func, args, kwargs, np=num_proc if np is None else np, hosts=hosts, hostfile=hostfile,
            start_timeout_s=start_timeout, ssh_port=ssh_port, ssh_identity_file=ssh_identity_file,
            output_dir=output_filename, verbose=bool(verbose), python=executable,
            iface=",".join(interfaces) if isinstance(interfaces, (list, tuple, set)) else interfaces,
            min_np=fewest, max_np=max_num_proc if max_np is None else max_np, slots_per_host=slots,
            host_discovery_script=host_discovery_script, reset_limit=reset_limit,
            blacklist_cooldown_range=cooldown_range, horovod=True,
        )  # fmt: skip
    except RemoteError as problem:
        raise RuntimeError(f"{_failed(problem.rank)}{problem}") from problem
    is_elastic = fewest is not None or host_discovery_script is not None
    return results[: fewest or num_proc] if is_elastic else results


def _failed(rank: Optional[int]) -> str:
    """How Horovod's text on a failed rank begins: programs look for it."""
    if rank is None:
        return ""  # the job did not start
    return (
        "Horovod detected that one or more processes exited with non-zero status, thus causing the job to be "
        f"terminated. The first process to do so was:\nProcess name: {rank}\n"
    )
