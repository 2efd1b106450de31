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
"""Packages that the launcher can send with ``--provision``."""
NEEDED = PROVISIONED[:1] if sys.platform.startswith("linux") else PROVISIONED
"""Those that ranks on this host need: Linux reports the addresses of its interfaces without psutil."""


def find_program(program: str, cwd: str, path: Optional[str]) -> Optional[str]:
    """Return the path of a program, or None; `path` is searched as ``PATH``, None means the default."""
    if "/" in program:
        program = os.path.join(cwd, program)
        return program if os.access(program, os.X_OK) and not os.path.isdir(program) else None
    return shutil.which(program, path=path)


def find_problem(
    config: Mapping[str, Any], program: str, cwd: str, path: Optional[str]
) -> Optional[Dict[str, Any]]:
    """Return the facts (``problem``, ``path``) of the first directory, program, script or output file that is
    missing or not usable; None if all are usable. `config` is :meth:`ringrun.plan.job.Job.agent_config`'s.
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
    """Return the system's error for writing a file, or "", without opening the file."""
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
    """Return the first directory of the ranks' module path: the script's, or the working directory."""
    script = config["script"]
    return os.path.dirname(os.path.join(cwd, script)) if script else cwd


def check_argv(config: Mapping[str, Any], program: str, cwd: str) -> List[str]:
    """Return the command of the trial import, with the ranks' interpreter and module path."""
    # An installed ringcomm has its dependencies; one that was sent may lack them. All packages that can be
    # sent are named at once, since a host is asked once.
    modules = list(NEEDED) if config["package"] or config["provision"] else ["numpy"]
    modules += ["ringcomm", "ringrun"] if config["horovod"] else ["ringcomm"]
    return [program, "-c", CHECK_SOURCE, _import_folder(config, cwd), *modules]


def can_be_provisioned(facts: Dict[str, Any], config: Mapping[str, Any]) -> bool:
    """Return whether the launcher must send a missing package; `facts` then get ``machine`` and ``glibc``."""
    lacking = facts.get("problem") == "missing" and facts["found"]["missing"] in PROVISIONED
    if lacking and config["provision"]:
        libc, version = platform.libc_ver()
        facts.update(machine=platform.machine(), glibc=version if libc == "glibc" else "")
        return True
    return False


def prepend_horovod_shim(env: Dict[str, str], ringrun_at: str) -> None:
    """Make ``import horovod`` import ringcomm's package, by an entry in ``PYTHONPATH`` of `env`. `ringrun_at`
    is the file of the package ``ringrun`` on this host.
    """
    folder = os.path.join(os.path.dirname(ringrun_at), "compat", "horovod_shim")
    prepend_module_path(env, folder)


def prepend_module_path(env: Dict[str, str], folder: str) -> None:
    """Make Python look into a directory first, by an entry in ``PYTHONPATH``."""
    before = env.get("PYTHONPATH")
    env["PYTHONPATH"] = folder + os.pathsep + before if before else folder


def master_facts() -> Dict[str, Any]:
    """Return the facts for ``MASTER_ADDR`` and ``MASTER_PORT``: ``port``, free at this moment, and ``login``,
    the variable ``SSH_CONNECTION`` or "".
    """
    with socket.socket() as probe:
        probe.bind(("", 0))
        return {"port": probe.getsockname()[1], "login": os.environ.get("SSH_CONNECTION", "")}


def check_result(
    output: bytes, program: str, config: Mapping[str, Any], how: Mapping[str, Any]
) -> Dict[str, Any]:
    """Return the facts of the trial import, with a ``problem`` if ranks cannot run. The check's own line is
    the last of `output`; `how` is its exit code or signal.
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
