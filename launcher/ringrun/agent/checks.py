# ruff: noqa: PTH110, PTH112, PTH118, PTH120
"""What a host lacks, found out before any rank starts there.

Standard library only: the launcher sends this file along with :mod:`ringrun.agent.agent`. Facts only; the
launcher turns them into sentences (:func:`ringrun.diagnosis.failure_report.host_problem`).
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
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
    found["missing"], found["why"] = name, "%s: %s" % (sys.exc_info()[0].__name__, sys.exc_info()[1])
sys.stdout.write("\\n" + json.dumps(found))
"""


def find_program(program: str, cwd: str, path: Optional[str]) -> Optional[str]:
    """Where a program is, or None: by its path, or in the directories of ``path``."""
    if "/" in program:
        program = os.path.join(cwd, program)
        return program if os.access(program, os.X_OK) and not os.path.isdir(program) else None
    return shutil.which(program, path=path)


def find_problem(
    config: Mapping[str, Any], program: str, cwd: str, path: Optional[str]
) -> Optional[Dict[str, Any]]:
    """What of directory, program and script is not there."""
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
    """Why a file could not be written, as the system would put it, or ""; nothing is written for that."""
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
    """Where the ranks' Python looks for modules first: next to the script, or in the directory."""
    script = config["script"]
    return os.path.dirname(os.path.join(cwd, script)) if script else cwd


def check_argv(config: Mapping[str, Any], program: str, cwd: str) -> List[str]:
    """The trial import, which looks where the ranks will."""
    wanted = ["numpy", "ringcomm", *(["ringrun"] if config["horovod"] else [])]
    return [program, "-c", CHECK_SOURCE, _import_folder(config, cwd), *wanted]


def prepend_horovod_shim(env: Dict[str, str], ringrun_at: str) -> None:
    """Have ``import horovod`` find ringcomm's, which is where ringrun is installed on this host."""
    folder = os.path.join(os.path.dirname(ringrun_at), "compat", "horovod_shim")
    known = env.get("PYTHONPATH")
    env["PYTHONPATH"] = folder + os.pathsep + known if known else folder


def master_facts() -> Dict[str, Any]:
    """What the launcher needs to say where ranks may meet: a free port, and the addresses of its login."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return {"port": probe.getsockname()[1], "login": os.environ.get("SSH_CONNECTION", "")}


def check_result(
    output: bytes, program: str, config: Mapping[str, Any], how: Mapping[str, Any]
) -> Dict[str, Any]:
    """What the trial import found; there is a ``problem`` in it if ranks cannot run.

    Args:
        output: all that it printed; its own line comes last.
        config: the job's; ``version`` is that of ringcomm at the launcher, ``bytecode`` that of the Python
            whose functions the ranks are to run, or "".
        how: how it ended.
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
