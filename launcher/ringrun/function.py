"""``rc.run(fn, args, np=2, hosts=…)``: run a Python function as a job."""

from __future__ import annotations

import importlib.machinery
import numbers
import os
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import cloudpickle

from ringcomm.errors import ConfigError, RemoteError
from ringcomm.results import remote_error, unpack

from .agent.worker import Call, carries_bytecode, pack_call
from .elastic.options import ElasticOptions
from .job.launch import Options, prepare
from .job.outcome import Outcome
from .job.restarts import Attempts
from .plan.job import Job
from .plan.setting_sources import from_values
from .reach.ssh import SshOptions
from .show.console import Console
from .show.notebook import own_console

PerHost = Union[None, str, "os.PathLike[str]", Mapping[Optional[str], Union[str, "os.PathLike[str]"]]]
"""One value for all hosts, or values by host."""


def run_function(
    fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Optional[Mapping[str, Any]] = None, *,
    np: Optional[int] = None, hosts: Optional[str] = None, hostfile: Optional[str] = None,
    env: Optional[Mapping[str, str]] = None, python: PerHost = None, cwd: PerHost = None,
    iface: PerHost = None, start_timeout_s: Optional[float] = None, timeout_s: Optional[float] = None,
    ssh: str = "ssh", ssh_port: Optional[int] = None, ssh_identity_file: Optional[str] = None,
    output_dir: Optional[str] = None, verbose: bool = False, console: Optional[Console] = None,
    config_file: Optional[str] = None, settings: Optional[Mapping[str, Any]] = None, restarts: int = 0,
    min_np: Optional[int] = None, max_np: Optional[int] = None, host_discovery_script: Optional[str] = None,
    slots_per_host: Optional[int] = None, reset_limit: Optional[int] = None,
    elastic_timeout_s: Optional[float] = None,
    blacklist_cooldown_range: Optional[Tuple[float, float]] = None, drop: Optional[str] = None,
    horovod: bool = False, via: Optional[str] = None,
) -> List[Any]:  # fmt: skip
    """Call ``fn(*args, **kwargs)`` once on every rank.

    Works from scripts, threads and notebooks; functions defined there are pickled by value. The output of
    ranks appears on ``sys.stdout`` and ``sys.stderr``. The options are those of ``ringrun``.

    Args:
        fn: the function that every rank calls.
        args: its positional arguments, the same on all ranks.
        kwargs: its keyword arguments.
        np: number of ranks; None for one per slot.
        hosts: the hosts with their slots, like ``"localhost,jetson1:2"``; None for this machine.
        hostfile: a file with the hosts, instead of ``hosts``.
        env: variables for the ranks, as with ``-x NAME=VALUE``.
        python: the interpreter, for all hosts or, as a dictionary, by host: ``{"jetson1": "/path"}``; the key
            None stands for all others. ``cwd`` and ``iface`` take dictionaries, too.
        cwd: the ranks' working directory; None for the current one.
        iface: the network interfaces to use: names, globs, CIDRs, ``!name`` to exclude.
        start_timeout_s: seconds until all hosts must be ready; also the time limit of ``init`` on the ranks.
        timeout_s: seconds without data from a peer after which a collective fails and names that peer.
        ssh: the ssh command, with options if needed.
        ssh_port: the ssh port on all hosts.
        ssh_identity_file: the private key for ssh.
        output_dir: directory to which the output of ranks is written, too.
        verbose: log the job's progress, and show the table of links.
        console: receives the output of ranks, instead of ``sys.stdout`` and ``sys.stderr``.
        config_file: a file with settings.
        settings: more settings by the names of their fields, like ``{"transport": "tcp"}``.
        restarts: how often the job is restarted if it fails.
        min_np: fewest ranks of an elastic job: it continues after losses while so many are left.
        max_np: most ranks of an elastic job.
        host_discovery_script: a command that prints the available hosts; it makes the job elastic.
        slots_per_host: for an elastic job: slots of hosts without a number.
        reset_limit: for an elastic job: how often the ranks may change.
        elastic_timeout_s: for an elastic job: seconds to wait for enough slots or ranks.
        blacklist_cooldown_range: for an elastic job: shortest and longest exclusion after a failure, seconds.
        drop: for an elastic job: what a failure excludes, ``"slot"`` or ``"host"``.
        horovod: whether ranks find ringcomm under the name ``horovod``.
        via: a command that reaches a host, instead of ssh, like ``"docker exec -i {host}"``.

    Returns:
        What the function returned on each rank, in rank order; for an elastic job on each rank of the end.

    Raises:
        RemoteError: a rank failed, or the job did not start.
        ConfigError: an option is not valid.
    """
    _check_types(
        fn, args, {"kwargs": kwargs, "env": env, "settings": settings},
        {"np": np, "ssh_port": ssh_port, "restarts": restarts, "min_np": min_np, "max_np": max_np,
         "slots_per_host": slots_per_host, "reset_limit": reset_limit},
        {"hosts": hosts, "hostfile": hostfile, "host_discovery_script": host_discovery_script, "drop": drop,
         "ssh": ssh, "via": via, "ssh_identity_file": ssh_identity_file,
         "output_dir": output_dir, "config_file": config_file,
         **_texts("python", python), **_texts("cwd", cwd), **_texts("iface", iface)},
    )  # fmt: skip
    timeouts = {"start_timeout_s": start_timeout_s, "timeout_s": timeout_s}
    more = {**{name: value for name, value in timeouts.items() if value is not None}, **(settings or {})}
    options = Options(
        np=np, hosts=hosts, hostfile=hostfile, output_dir=output_dir, verbose=verbose, restarts=restarts,
        forward=tuple(f"{name}={value}" for name, value in (env or {}).items()),
        pythons=_per_host(python), cwds=_per_host(cwd), ifaces=_per_host(iface),
        setting_values=from_values(more), config_file=config_file,
        ssh=SshOptions(ssh, ssh_port, ssh_identity_file), horovod=horovod, via=via,
        elastic=ElasticOptions(
            min_np, max_np, host_discovery_script, slots_per_host, reset_limit, elastic_timeout_s,
            blacklist_cooldown_range, drop,
        ),
    )  # fmt: skip
    command = ["-m", "ringrun.agent.worker"]
    job = prepare(options, command, payload=b"", local_env=_import_path())
    payload = _pack(Call(fn, tuple(args), dict(kwargs or {})), by_value=not job.all_local)
    job = with_payload(job, payload)
    attempts = Attempts(job, options.restarts, console or own_console())
    outcome = attempts.run()
    return unpack_results(attempts.job, outcome)


def _texts(name: str, value: object) -> Dict[str, object]:
    """The values of an argument for all hosts or by host, by their names in error messages."""
    if not isinstance(value, Mapping):
        return {name: value}
    found: Dict[str, object] = {f"{name}[{host!r}]": item for host, item in value.items()}
    for host in value:
        if host is not None and not isinstance(host, str):
            raise ConfigError(f"{name}={value!r}: {host!r} is not a host name.")
    return found


def _per_host(value: Any) -> Tuple[str, ...]:
    """An argument in the form of options: ``VALUE``, or ``HOST=VALUE`` for each host."""
    if isinstance(value, Mapping):
        rows = [(host, os.fspath(item)) for host, item in value.items() if item is not None]
        return tuple(item if host is None else f"{host}={item}" for host, item in rows)
    return () if value is None else (os.fspath(value),)


def _check_types(
    fn: object, args: object, tables: Mapping[str, object], counts: Mapping[str, object],
    texts: Mapping[str, object],
) -> None:  # fmt: skip
    """Check the types of arguments, so that the error names the argument."""
    if not callable(fn):
        raise ConfigError(f"The first argument must be the function that every rank calls, not {fn!r}.")
    if not isinstance(args, (list, tuple)):
        raise ConfigError(f"args={args!r}: the arguments must be a list or a tuple, like args=(1,).")
    for name, value in tables.items():
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{name}={value!r} is not a dictionary.")
    for name, value in counts.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, numbers.Integral)):
            raise ConfigError(f"{name}={value!r} is not a whole number.")
    for name, value in texts.items():
        may_be_path = name.partition("[")[0] in ("python", "cwd", "hostfile", "output_dir", "config_file")
        is_path = may_be_path and isinstance(value, os.PathLike)
        if not (value is None or is_path or isinstance(value, str)):
            like = ', like "localhost,jetson1:2"' if name == "hosts" else ""
            raise ConfigError(f"{name}={value!r} is not a string{like}.")


def with_payload(job: Job, payload: bytes) -> Job:
    """The job with its payload, whose pickling depends on whether all hosts are this machine."""
    from dataclasses import replace

    bytecode = "{}.{}".format(*sys.version_info) if carries_bytecode(payload) else ""
    return replace(job, payload=payload, bytecode=bytecode)


def unpack_results(job: Job, outcome: Outcome) -> List[Any]:
    """The functions' return values in rank order.

    Args:
        job: the job that was run.
        outcome: how it ended, with the signed results of its ranks.

    Raises:
        RemoteError: the job failed; its cause is the exception of the rank that failed first.
    """
    ranks = range(job.plan.size) if outcome.members is None else outcome.members
    forged = next((rank for rank, data in outcome.results.items() if data is None), None)
    if forged is not None and outcome.exit_code == 0:
        host = job.host_of(forged).name
        raise RemoteError(
            f"The result of rank {forged} on {host} has no valid signature of that rank, and was not "
            "unpickled: another process has written to its result descriptor, or changed the data.",
            rank=forged, host=host,
        )  # fmt: skip
    if outcome.exit_code == 0 and all(rank in outcome.results for rank in ranks):
        return [unpack(outcome.results[rank] or b"")["value"] for rank in ranks]
    rank = None if outcome.cause is None else outcome.cause.rank
    if rank is None:
        if outcome.exit_code == 0:
            missing = next(rank for rank in ranks if rank not in outcome.results)
            host = job.host_of(missing).name
            raise RemoteError(
                f"rank {missing} on {host} ended with exit code 0, but without a result: the function "
                "ended the process (sys.exit, os._exit).", rank=missing, host=host,
            )  # fmt: skip
        raise RemoteError(outcome.report or "The job was stopped before its functions returned.")
    host = job.host_of(rank).name
    result = outcome.results.get(rank)
    found = unpack(result) if result else {"ok": True}
    if found["ok"]:
        raise RemoteError(outcome.report, rank=rank, host=host)
    raise remote_error(found, rank, host)


def _pack(call: Call, by_value: bool) -> bytes:
    """Pickle the call. A module that workers cannot import is pickled by value."""
    module = sys.modules.get(getattr(call.fn, "__module__", None) or "")
    path = [str(Path(item or os.curdir).absolute()) for item in sys.path]
    if module is None or module.__name__ == "__main__" or not _is_sent_by_value(module, by_value):
        return pack_call(call, path)
    cloudpickle.register_pickle_by_value(module)
    try:
        return pack_call(call, path)
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _is_sent_by_value(module: ModuleType, elsewhere: bool) -> bool:
    """Whether a new interpreter cannot import a module, here or on another machine (``elsewhere``)."""
    file = getattr(module, "__file__", None)
    if file is None:
        return False
    top = module.__name__.partition(".")[0]
    if importlib.machinery.PathFinder.find_spec(top, sys.path) is None:
        return True
    installed = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    return elsewhere and not any(Path(folder) in Path(file).parents for folder in installed if folder)


def _import_path() -> Dict[str, str]:
    """PYTHONPATH for ranks on this machine, if ringrun and ringcomm are imported without being installed."""
    import ringcomm
    import ringrun

    entries = [item for item in os.environ.get("PYTHONPATH", "").split(os.pathsep) if item]
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    for package in (ringrun, ringcomm):
        root = str(Path(str(package.__file__)).absolute().parent.parent)
        if root not in installed and root not in entries:
            entries.append(root)
    return {"PYTHONPATH": os.pathsep.join(entries)} if entries else {}
