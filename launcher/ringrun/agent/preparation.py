"""The preparation of a host before its ranks start: packages, the user's code, and the checks.

Standard library only: the launcher sends this file with :mod:`ringrun.agent.agent`. Each step returns the
name of an event for the launcher and its facts, or ``CHECK`` and the command of the trial import that the
agent runs.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Dict, Iterator, Mapping, Tuple

from ringrun.agent import checks, job_folder, shipped

CHECK = "check"
Step = Tuple[str, Dict[str, Any]]


class Preparation:
    """The preparation of one job on this host. It adds the module path to `env`, and :meth:`use` changes
    `config`. `limits` are the facts about threads for the event ``ready``; `cwd` becomes the job's own
    directory if its code is sent.
    """

    def __init__(
        self, config: Dict[str, Any], env: Dict[str, str], program: str, cwd: str, limits: Mapping[str, Any]
    ) -> None:
        self._config, self._env, self._program, self._limits = config, env, program, limits
        self._interpreter = ""
        self.cwd = cwd
        self.folder = job_folder.JobFolder(config["folder"], config["code"], os.environ)

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
        problem = checks.find_problem(self._config, self._program, self.cwd, self._env.get("PATH"))
        if problem is not None:
            return "problem", problem
        if self._config["python"] or self._config["horovod"]:
            self._interpreter = self._program if self._config["python"] else sys.executable
            return CHECK, {"argv": checks.check_argv(self._config, self._interpreter, self.cwd)}
        return self._ready({})

    def checked(self, output: bytes, how: Mapping[str, Any]) -> Step:
        """Return the step after the trial import, from its output and its exit code or signal."""
        facts = checks.check_result(output, self._interpreter, self._config, how)
        if checks.can_be_provisioned(facts, self._config):
            return "needs", facts
        if "problem" in facts:
            return "problem", facts
        if self._config["horovod"]:
            checks.prepend_horovod_shim(self._env, facts["found"]["ringrun_at"])
        return self._ready(facts)

    def _ready(self, facts: Mapping[str, Any]) -> Step:
        return "ready", {**facts, **checks.master_facts(), "limits": self._limits}

    def fetched(self) -> Iterator[bytes]:
        """Return the pieces of the files to send; see :meth:`ringrun.agent.job_folder.JobFolder.fetched`."""
        return iter(()) if self.folder.path is None else self.folder.fetched(self._config["fetch"])
