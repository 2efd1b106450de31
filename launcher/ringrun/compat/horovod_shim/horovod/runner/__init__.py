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
    """Call a function on every rank, as ``ringcomm.run`` does.

    Args:
        func: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        num_proc: number of ranks; ``np`` is the same.
        hosts: the hosts with their slots, like ``"localhost,jetson1:2"``.
        hostfile: a file with the hosts.
        start_timeout: seconds until all hosts must be ready; also the time limit of ``init`` on the ranks.
        ssh_port: the ssh port on all hosts.
        ssh_identity_file: the private key for ssh.
        output_filename: directory to which the output of ranks is written, too.
        verbose: log the job's progress.
        network_interfaces: the interfaces to use, separated by commas.
        executable: the Python interpreter of the ranks.
        np: number of ranks, if ``num_proc`` is not given; the default is 1.
        disable_cache: has no effect.
        use_gloo: has no effect.

    Returns:
        What the function returned on each rank, in rank order.

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
