"""``rc.run(fn, args, np=2, hosts=…)``: run a Python function as a job."""

from __future__ import annotations

import importlib.machinery
import numbers
import os
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import cloudpickle

from ringcomm.calls.objects import remote_error, unpack
from ringcomm.configuration.settings import SettingValue, nearest
from ringcomm.errors import ConfigError, RemoteError

from .agent.worker import Call, pack_call
from .job.launch import prepare
from .job.outcome import Outcome
from .job.supervise import Attempts
from .plan import options as kinds
from .plan.environment import from_values
from .plan.job import Job
from .plan.options import Option, Options, table, takes_options
from .show.output import Console


@takes_options
def run(
    fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Optional[Mapping[str, Any]] = None, *,
    start_timeout_s: Optional[float] = None,
    settings: Optional[Mapping[str, Any]] = None, console: Optional[Console] = None, **options: Any,
) -> List[Any]:  # fmt: skip
    """Call ``fn(*args, **kwargs)`` once on every rank, and return the results in rank order.

    It works in scripts, threads and notebooks. cloudpickle sends the function, and functions that are defined
    there are pickled by value. The function calls ``ringcomm.init()``, and can then use the collectives. The
    output of ranks appears on ``sys.stdout`` and ``sys.stderr``. The options are the same as for ``ringrun``.

    Example: ``rc.run(train, args=(0.1,), np=3, hosts="localhost,jetson1,jetson2")``.

    Args:
        fn: the function that every rank calls.
        args: its positional arguments, the same on all ranks.
        kwargs: its keyword arguments.
        start_timeout_s: seconds in which all hosts must be ready. It is also the time limit of ``init()`` on
            the ranks.
        settings: more settings by the names of the fields of ``Settings``, like ``{"transport": "tcp"}``.
        console: an object that receives the output of ranks, instead of ``sys.stdout`` and ``sys.stderr``.
        {options}

    Returns:
        The results of the function on all ranks, in rank order. In an elastic job, these are the ranks at the
        end.

    Raises:
        RemoteError: a rank failed, or the job did not start.
        ConfigError: an option is not valid.
    """
    if not callable(fn):
        raise ConfigError(f"The first argument must be the function that every rank calls, not {fn!r}.")
    if not isinstance(args, (list, tuple)):
        raise ConfigError(f"args={args!r}: the arguments must be a list or a tuple, like args=(1,).")
    _check_table("kwargs", kwargs)
    _check_table("settings", settings)
    if not (console is None or hasattr(console, "coloured")):
        raise ConfigError(f"console={console!r} is not a console, which receives the output of ranks.")
    more = {**({} if start_timeout_s is None else {"start_timeout_s": start_timeout_s}), **(settings or {})}
    chosen = options_of(options, from_values(more))
    job = prepare(chosen, ["-m", "ringrun.agent.worker"], payload=b"", local_env=_import_path())
    payload = _pack(Call(fn, tuple(args), dict(kwargs or {})), by_value=not job.all_local)
    # Functions in it by value, which only the same minor version can load.
    bytecode = "{}.{}".format(*sys.version_info) if b"CodeType" in payload else ""
    job = replace(job, payload=payload, bytecode=bytecode)
    attempts = Attempts(job, chosen.restarts, console or Console())
    outcome = attempts.run()
    return unpack_results(attempts.job, outcome)


def options_of(given: Mapping[str, Any], setting_values: Tuple[SettingValue, ...] = ()) -> Options:
    """Return the options of a job from the arguments of :func:`run`, after a check of their types."""
    known = {option.argument: (item.name, option) for item, option in table() if option.argument}
    found: Dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            near = nearest(name, known)
            hint = f". Did you mean {near!r}?" if near else ""
            raise TypeError(f"run() got an unexpected keyword argument {name!r}{hint}")
        field, option = known[name]
        found[field] = _converted(name, option, value)
    return Options(setting_values=setting_values, **found)


def _converted(name: str, option: Option, value: Any) -> Any:
    """Return an argument of :func:`run` in the form of :class:`Options`, after a check of its type."""
    if option.kind == kinds.VARIABLES:
        _check_table(name, value)
        return tuple(f"{variable}={text}" for variable, text in (value or {}).items())
    if option.kind == kinds.PER_HOST:
        by_host = value if isinstance(value, Mapping) else {None: value}
        for host, item in by_host.items():
            _check_text(f"a host of {name}", host, False)
            _check_text(name if host is None else f"{name}[{host!r}]", item, name != "iface")
        rows = [(host, os.fspath(item)) for host, item in by_host.items() if item is not None]
        return tuple(item if host is None else f"{host}={item}" for host, item in rows)
    if option.kind in (kinds.TEXT, kinds.PATH):
        _check_text(name, value, option.kind == kinds.PATH)
        return value if value is None or option.kind == kinds.TEXT else os.fspath(value)
    if option.kind in (kinds.WHOLE, kinds.NUMBER) and value is not None:
        of: Any = numbers.Integral if option.kind == kinds.WHOLE else numbers.Real
        if not isinstance(value, of) or isinstance(value, bool):
            whole = " whole" if option.kind == kinds.WHOLE else ""
            raise ConfigError(f"{name}={value!r} is not a{whole} number.")
        low, high = option.within
        if (low is not None and value < low) or (high is not None and value > high):
            bounds = f"at least {low}" if high is None else f"from {low} to {high}"
            raise ConfigError(f"{name}={value!r} is out of range: it must be {bounds}.")
    return value


def _check_table(name: str, value: object) -> None:
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{name}={value!r} is not a dictionary.")


def _check_text(name: str, value: object, may_be_path: bool) -> None:
    if not (value is None or isinstance(value, str) or (may_be_path and isinstance(value, os.PathLike))):
        like = ', like "localhost,jetson1:2"' if name == "hosts" else ""
        raise ConfigError(f"{name}={value!r} is not a string{like}.")


def unpack_results(job: Job, outcome: Outcome) -> List[Any]:
    """Return the functions' values in rank order; RemoteError if the job failed."""
    ranks = range(job.plan.size) if outcome.members is None else outcome.members
    rank = None if outcome.cause is None else outcome.cause.rank
    text = outcome.report or "The job was stopped before its functions returned."
    if outcome.exit_code == 0:
        rank = next((rank for rank in ranks if not outcome.results.get(rank)), None)
        if rank is None:
            return [unpack(outcome.results[rank] or b"")["value"] for rank in ranks]
        text = (
            f"rank {rank} on {job.host_of(rank).name} ended with exit code 0, but without a result: the "
            "function ended the process (sys.exit, os._exit)."
        )
        if rank in outcome.results:
            text = (
                f"The result of rank {rank} on {job.host_of(rank).name} has no valid signature of that rank, "
                "and was not unpickled: another process has written to its result descriptor, or changed the "
                "data."
            )
    if rank is None:
        raise RemoteError(text)
    result, host = outcome.results.get(rank), job.host_of(rank).name
    found = unpack(result) if result else {"ok": True}
    raise RemoteError(text, rank=rank, host=host) if found["ok"] else remote_error(found, rank, host)


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
    """Return whether a new interpreter cannot import a module, here or `elsewhere` on another machine."""
    file = getattr(module, "__file__", None)
    if file is None:
        return False
    top = module.__name__.partition(".")[0]
    if importlib.machinery.PathFinder.find_spec(top, sys.path) is None:
        return True
    installed = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    return elsewhere and not any(Path(folder) in Path(file).parents for folder in installed if folder)


def _import_path() -> Dict[str, str]:
    """Return PYTHONPATH for ranks on this machine, if ringrun and ringcomm are not installed."""
    import ringcomm
    import ringrun

    entries = [item for item in os.environ.get("PYTHONPATH", "").split(os.pathsep) if item]
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    for package in (ringrun, ringcomm):
        root = str(Path(str(package.__file__)).absolute().parent.parent)
        if root not in installed and root not in entries:
            entries.append(root)
    return {"PYTHONPATH": os.pathsep.join(entries)} if entries else {}
