"""``horovod.run``: runs a function as a job."""

from __future__ import annotations

from typing import Any, Callable, List, Mapping, Optional, Sequence


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Optional[Mapping[str, Any]] = None,
    num_proc: Optional[int] = None,
    hosts: Optional[str] = None,
    hostfile: Optional[str] = None,
    start_timeout: Optional[float] = None,
    ssh_port: Optional[int] = None,
    ssh_identity_file: Optional[str] = None,
    output_filename: Optional[str] = None,
    verbose: Optional[bool] = None,
    network_interfaces: Optional[str] = None,
    executable: Optional[str] = None,
    np: Optional[int] = None,
    disable_cache: Optional[bool] = None,
    use_gloo: Optional[bool] = None,
    **others: Any,
) -> List[Any]:
    """Start a job that calls a function on every rank, and return the results in rank order.

    Args:
        func: the function; it and its arguments are pickled.
        args: its positional arguments.
        kwargs: its keyword arguments.
        num_proc: number of ranks.
        hosts: ``host:slots,...``.
        hostfile: path of a file with one host per line.
        start_timeout: seconds until all ranks must have started.
        ssh_port: port of the SSH servers.
        ssh_identity_file: private key for SSH.
        output_filename: directory for the output of each rank.
        verbose: log how the job is started.
        network_interfaces: network interfaces to use, comma-separated.
        executable: the Python interpreter.
        np: older name of ``num_proc``.
        disable_cache: no effect.
        use_gloo: no effect.
        others: further options of Horovod; an error if one is set.

    Returns:
        the return values of all ranks.

    Raises:
        NotImplementedError: an option belongs to MPI or to elastic training.
    """
    from ringrun.function import run_function

    unsupported = sorted(name for name, value in others.items() if value)
    if unsupported:
        raise NotImplementedError(f"horovod.run has no {', '.join(unsupported)} with ringcomm.")
    return run_function(
        func, args, kwargs, np=num_proc or np or 1, hosts=hosts, hostfile=hostfile,
        start_timeout_s=start_timeout, ssh_port=ssh_port, ssh_identity_file=ssh_identity_file,
        output_dir=output_filename, verbose=bool(verbose), iface=network_interfaces, python=executable,
    )  # fmt: skip
