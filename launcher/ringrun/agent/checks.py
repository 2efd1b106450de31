# ruff: noqa: PTH110, PTH112, PTH118, PTH120
"""The preparation of a host before any rank starts there: packages, the user's code, and checks.

Standard library only: the launcher sends this file with :mod:`ringrun.agent.agent`. Steps and checks return
facts; the launcher makes messages of them (:func:`ringrun.diagnosis.failure_report.host_problem`). As a
program it is ``--check-build`` of a host.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import socket
import sys
from importlib.util import find_spec
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple

from ringrun.agent import shipped

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
    """Return the facts of the first directory, program, script or output file that is not usable, or None."""
    script, beside = config["script"], _import_folder(config, cwd)
    if not os.path.isdir(cwd):
        return {"problem": "cwd", "path": cwd}
    if not find_program(program, cwd, path):
        return {"problem": "interpreter" if config["python"] else "program", "path": program}
    if script and not os.path.exists(os.path.join(cwd, script)):
        return {"problem": "script", "path": os.path.join(cwd, script)}
    why = _why_unwritable(os.path.join(cwd, config["timeline"])) if config["timeline"] else ""
    if why:
        return {"problem": "write", "path": os.path.join(cwd, config["timeline"]), "why": why}
    if config["horovod"] and config["python"]:
        for name in ("horovod.py", os.path.join("horovod", "__init__.py")):
            if os.path.exists(os.path.join(beside, name)):
                return {"problem": "shadow", "path": os.path.join(beside, name)}
    return None


def _why_unwritable(path: str) -> str:
    """Return why a file cannot be written, or "", without opening it."""
    if os.path.isdir(path):
        return os.strerror(errno.EISDIR)
    place = path if os.path.exists(path) else os.path.dirname(path)
    return "" if os.access(place, os.W_OK) else f"there is no directory {place} that may be written"


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


def check_result(
    output: bytes, program: str, config: Mapping[str, Any], how: Mapping[str, Any]
) -> Dict[str, Any]:
    """Return the facts of the trial import (the last line of `output`), perhaps with a ``problem``."""
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


# -- steps ------------------------------------------------------------------------------------

CHECK = "check"
Step = Tuple[str, Dict[str, Any]]
"""The name of an event for the launcher and its facts; or ``CHECK`` and the command of the trial import."""


class Preparation:
    """The preparation of one job on this host. It changes `env` (the module path) and `config`; `cwd` becomes
    the job's own directory if its code is sent.
    """

    def __init__(
        self, config: Dict[str, Any], env: Dict[str, str], program: str, cwd: str, limits: Mapping[str, Any]
    ) -> None:
        self._config, self._env, self._program, self._limits = config, env, program, limits
        self._interpreter = ""
        self.cwd = cwd
        self.folder = shipped.JobFolder(config["folder"], config["code"], os.environ)

    def use(self, digest: str) -> Step:
        """Use one more package, which the launcher made for this host."""
        self._config.update(package=digest, provision=False)
        return self.use_package()

    def use_package(self, archive: bytes = b"") -> Step:
        """Make the launcher's package (`archive`, if it was sent) importable, then continue."""
        facts = shipped.use(self._config["package"], archive, self._env)
        if facts is None:
            return self.place_code()
        return ("problem", facts) if facts else ("lacks", {})

    def place_code(self, archive: bytes = b"") -> Step:
        """Make the directory of the user's code (`archive`: lacking contents), if sent, then continue."""
        facts = self.folder.prepare(archive)
        if facts:
            return ("problem" if "problem" in facts else "lacks"), facts
        if self.folder.path is not None:
            self.cwd = os.path.join(self.folder.path, self._config["code_at"])  # noqa: PTH118
        return self._check()

    def _check(self) -> Step:
        """Check everything that needs no interpreter, then have the ranks' interpreter try the imports."""
        problem = find_problem(self._config, self._program, self.cwd, self._env.get("PATH"))
        if problem is not None:
            return "problem", problem
        if self._config["python"] or self._config["horovod"]:
            self._interpreter = self._program if self._config["python"] else sys.executable
            return CHECK, {"argv": check_argv(self._config, self._interpreter, self.cwd)}
        return self._ready({})

    def checked(self, output: bytes, how: Mapping[str, Any]) -> Step:
        """Return the step after the trial import, from its output and its exit code or signal."""
        facts = check_result(output, self._interpreter, self._config, how)
        lacking = facts.get("problem") == "missing" and facts["found"]["missing"] in PROVISIONED
        if lacking and self._config["provision"]:
            libc, version = platform.libc_ver()
            glibc = version if libc == "glibc" else ""
            return "needs", {**facts, "machine": platform.machine(), "glibc": glibc}
        if "problem" in facts:
            return "problem", facts
        if self._config["horovod"]:  # `import horovod` must import ringcomm's package
            shim = os.path.join(os.path.dirname(facts["found"]["ringrun_at"]), "compat", "horovod_shim")
            shipped.prepend_module_path(self._env, shim)
        return self._ready(facts)

    def _ready(self, facts: Mapping[str, Any]) -> Step:
        """Return the last step; ``port`` (a free one) and ``login`` are for ``MASTER_PORT`` and ``_ADDR``."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port, login = probe.getsockname()[1], os.environ.get("SSH_CONNECTION", "")
        return "ready", {**facts, "port": port, "login": login, "limits": self._limits}

    def fetched(self) -> Iterator[bytes]:
        """Return the pieces of the files to send; see :meth:`ringrun.agent.shipped.JobFolder.fetched`."""
        return iter(()) if self.folder.path is None else self.folder.fetched(self._config["fetch"])


# -- --check-build ----------------------------------------------------------------------------

_BUILD = """\
ringcomm v{version} (Python {python}, {executable}):

Available Frameworks:
{frameworks}

Available Controllers:
    [ ] MPI
    [X] Gloo (replaced by ringcomm's own links over TCP and shared memory)

Available Tensor Operations:
    [ ] NCCL
    [ ] DDL
    [ ] CCL
    [ ] MPI
    [X] Gloo (replaced by ringcomm's own links over TCP and shared memory)
"""
_FRAMEWORKS = {
    "TensorFlow": "tensorflow", "PyTorch": "torch", "MXNet": "mxnet", "Keras": "keras", "JAX": "jax",
    "MLX": "mlx", "Lightning": "lightning", "NumPy, and arrays that can be viewed as NumPy arrays": "numpy",
}  # fmt: skip


def describe_build() -> str:
    """Return the frameworks that can be found here, as ``horovodrun --check-build`` shows them."""
    from ringcomm.version import __version__

    lines = []
    for title, module in _FRAMEWORKS.items():
        try:
            is_installed = find_spec(module) is not None
        except (ImportError, ValueError):  # ValueError: sys.modules has such a module without a spec
            is_installed = False
        lines.append(f"    [X] {title}" if is_installed else f"    [ ] {title} (not installed)")
    python = sys.version.split()[0]
    return _BUILD.format(
        version=__version__, python=python, executable=sys.executable, frameworks="\n".join(lines)
    )


if __name__ == "__main__":
    sys.stdout.write(describe_build())
