# ruff: noqa: PTH110, PTH112, PTH118, PTH120
"""Checks of a host before any rank starts there: directory, interpreter, script, versions.

Standard library only: the launcher sends this file with :mod:`ringrun.agent.agent`. The checks return facts;
the launcher makes messages of them (:func:`ringrun.diagnosis.failure_report.host_problem`).
"""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import socket
import sys
from typing import Any, Dict, List, Mapping, Optional

# Runs under the ranks' interpreter, which may be older than 3.8.
CHECK_SOURCE = """
import sys
if sys.path and sys.path[0] == "":
    sys.path[0] = sys.argv[1]
found = {"python": sys.executable, "version": "%d.%d.%d" % sys.version_info[:3]}
found["old"] = sys.version_info < (3, 8)
try:
    import json
    for name in [] if found["old"] else sys.argv[2:]:
        module = __import__(name)
        found[name] = getattr(module, "__version__", None)
        found[name + "_at"] = getattr(module, "__file__", None)
except Exception:
    from importlib.util import find_spec
    found["missing"], found["why"] = name, "%s: %s" % (sys.exc_info()[0].__name__, sys.exc_info()[1])
    found["lacks"] = [name] + [item for item in sys.argv[2:] if item != name and find_spec(item) is None]
sys.stdout.write("\\n" + json.dumps(found))
"""


PROVISIONED = ("numpy", "psutil")
"""What the launcher can send with ``--provision``."""
NEEDED = PROVISIONED[:1] if sys.platform.startswith("linux") else PROVISIONED
"""What ranks on this host need of it: Linux tells the addresses of its interfaces without psutil."""


def find_program(program: str, cwd: str, path: Optional[str]) -> Optional[str]:
    """The path of a program, or None if it does not exist.

    Args:
        program: a path, relative to ``cwd``, or a name to find in ``path``.
        cwd: the ranks' working directory.
        path: the directories to search, as in ``PATH``; None for the default.
    """
    if "/" in program:
        program = os.path.join(cwd, program)
        return program if os.access(program, os.X_OK) and not os.path.isdir(program) else None
    return shutil.which(program, path=path)


def find_problem(
    config: Mapping[str, Any], program: str, cwd: str, path: Optional[str]
) -> Optional[Dict[str, Any]]:
    """The first of directory, program, script and output files that is missing or not usable.

    Args:
        config: the job's (:meth:`ringrun.plan.job.Job.agent_config`).
        program: the first word of the ranks' command.
        cwd: the ranks' working directory.
        path: the ranks' ``PATH``.

    Returns:
        ``problem``, its kind, and ``path``; None if there is no problem.
    """
    script = config["script"]
    beside = _import_folder(config, cwd)
    if not os.path.isdir(cwd):
        return {"problem": "cwd", "path": cwd}
    if not find_program(program, cwd, path):
        return {"problem": "interpreter" if config["python"] else "program", "path": program}
    if script and not os.path.exists(os.path.join(cwd, script)):
        return {"problem": "script", "path": os.path.join(cwd, script)}
    for option, path in config["writes"]:
        why = _why_unwritable(os.path.join(cwd, path))
        if why:
            return {"problem": "write", "path": os.path.join(cwd, path), "option": option, "why": why}
    if config["horovod"] and config["python"]:
        for name in ("horovod.py", os.path.join("horovod", "__init__.py")):
            if os.path.exists(os.path.join(beside, name)):
                return {"problem": "shadow", "path": os.path.join(beside, name)}
    return None


def _why_unwritable(path: str) -> str:
    """The system's error for writing a file, or ""; the file is not opened for that."""
    if os.path.isdir(path):
        return os.strerror(errno.EISDIR)
    folder = os.path.dirname(path)
    if not os.path.exists(folder):
        return "there is no directory " + folder
    if not os.path.isdir(folder):
        return os.strerror(errno.ENOTDIR)
    place = path if os.path.exists(path) else folder
    return "" if os.access(place, os.W_OK) else os.strerror(errno.EACCES)


def _import_folder(config: Mapping[str, Any], cwd: str) -> str:
    """The first directory of the ranks' module path: the script's, or the working directory."""
    script = config["script"]
    return os.path.dirname(os.path.join(cwd, script)) if script else cwd


def check_argv(config: Mapping[str, Any], program: str, cwd: str) -> List[str]:
    """The command of the trial import, with the ranks' interpreter and module path."""
    # An installed ringcomm came with what it needs; one that was sent did not. And what can be sent is all
    # named at once, since a host is asked once.
    modules = list(NEEDED) if config["package"] or config["provision"] else ["numpy"]
    modules += ["ringcomm", "ringrun"] if config["horovod"] else ["ringcomm"]
    return [program, "-c", CHECK_SOURCE, _import_folder(config, cwd), *modules]


def can_be_provisioned(facts: Dict[str, Any], config: Mapping[str, Any]) -> bool:
    """Return whether the launcher is to send what the trial import lacked.

    Then ``machine`` and ``glibc`` are added.

    Args:
        facts: the result of :func:`check_result`; may be changed.
        config: the job's.
    """
    lacking = facts.get("problem") == "missing" and facts["found"]["missing"] in PROVISIONED
    if lacking and config["provision"]:
        libc, version = platform.libc_ver()
        facts.update(machine=platform.machine(), glibc=version if libc == "glibc" else "")
        return True
    return False


def prepend_horovod_shim(env: Dict[str, str], ringrun_at: str) -> None:
    """Make ``import horovod`` import ringcomm's package, by an entry in ``PYTHONPATH``.

    Args:
        env: the ranks' environment; changed.
        ringrun_at: the file of the package ``ringrun`` on this host.
    """
    folder = os.path.join(os.path.dirname(ringrun_at), "compat", "horovod_shim")
    prepend_module_path(env, folder)


def prepend_module_path(env: Dict[str, str], folder: str) -> None:
    """Make Python look into a directory first, by an entry in ``PYTHONPATH``."""
    before = env.get("PYTHONPATH")
    env["PYTHONPATH"] = folder + os.pathsep + before if before else folder


def master_facts() -> Dict[str, Any]:
    """Return what the launcher needs for ``MASTER_ADDR`` and ``MASTER_PORT``.

    A free port, and the ssh addresses.

    Returns:
        ``port``, free at this moment, and ``login``, the variable ``SSH_CONNECTION`` or "".
    """
    with socket.socket() as probe:
        probe.bind(("", 0))
        return {"port": probe.getsockname()[1], "login": os.environ.get("SSH_CONNECTION", "")}


def check_result(
    output: bytes, program: str, config: Mapping[str, Any], how: Mapping[str, Any]
) -> Dict[str, Any]:
    """The result of the trial import, with a ``problem`` if ranks cannot run.

    Args:
        output: all of its output; its own line is the last.
        program: the interpreter that ran it.
        config: the job's; ``version`` is the launcher's version of ringcomm, ``bytecode`` the version of the
            Python whose functions the ranks run, or "".
        how: its exit code or signal.
    """
    last = output.rpartition(b"\n")[2].decode("utf-8", "replace")
    if not (last.startswith("{") and last.endswith("}")):
        text = output[-2000:].decode("utf-8", "replace")
        return dict(how, problem="check", path=program, text=text)
    found: Dict[str, Any] = json.loads(last)
    facts: Dict[str, Any] = {"path": program, "found": found}
    if found["old"]:
        facts["problem"] = "old"
    elif config["bytecode"] not in ("", found["version"].rpartition(".")[0]):
        facts.update(problem="bytecode", wanted=config["bytecode"])
    elif "missing" in found:
        facts["problem"] = "missing"
    elif config["version"] and found["ringcomm"] and config["version"] != found["ringcomm"]:
        facts.update(problem="version", wanted=config["version"])
    return facts
