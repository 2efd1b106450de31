"""Environment variables that the program looks up and that are not the same on all hosts. Pure."""

from __future__ import annotations

import re
from typing import Dict, List, Mapping, Optional, Sequence

from ..agent.recorders import value_digest
from ..agent.threads import FOLLOW_OPENMP, OPENMP, OTHERS

_BY_DESIGN = {
    "CI", "COLORTERM", "COLUMNS", "CROSS_RANK", "CROSS_SIZE", "CUDA_VISIBLE_DEVICES", "DISPLAY", "EDITOR",
    "FORCE_COLOR", "GROUP_RANK", "HOME", "HOST", "HOSTNAME", "LANG", "LANGUAGE", "LD_LIBRARY_PATH",
    "LD_PRELOAD", "LINES", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOGNAME", "MAIL", "MASTER_ADDR", "MASTER_PORT",
    "NODE_RANK", "NO_COLOR", "NVIDIA_VISIBLE_DEVICES", "OLDPWD", "PAGER", "PATH", "PWD", "PYTHONPATH",
    "PYTHONUNBUFFERED", "RANK", "SHELL", "SHLVL", "TEMP", "TERM", "TERM_PROGRAM", "TMP", "TMPDIR", "TZ",
    "USER", "USERNAME", "VIRTUAL_ENV", "WORLD_SIZE", OPENMP, *FOLLOW_OPENMP, *OTHERS,
}  # fmt: skip
_BY_DESIGN_PREFIXES = (
    "RINGCOMM_", "HOROVOD_", "SLURM_", "OMPI_", "PMI", "KUBERNETES_", "SSH_", "XDG_", "LC_", "CONDA_",
    "DBUS_", "VSCODE_", "JPY_",
)  # fmt: skip
"""Names, and beginnings of names, whose values belong to a host, a login or a rank."""

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|PWD|CRED|AUTH|COOKIE|SESSION|PRIVATE|SIGNATURE|DSN", re.I)
_HARMLESS = re.compile(r"[\w.,:+/@=-]{1,24}\Z", re.ASCII)
_LOOKS_RANDOM = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])[A-Za-z0-9_+/=-]{16,}\Z|://.*@")
_MAX_NAMED = 5


class Variables:
    """The variables that programs on the hosts of a job have looked up.

    Args:
        job: the job's identifier.
        environ: the launching shell's environment.
    """

    def __init__(self, job: str, environ: Mapping[str, str]) -> None:
        self._job, self._environ = job, environ
        self._digests: Dict[str, Dict[str, Optional[str]]] = {}

    def take(self, host: str, values: Mapping[str, Optional[str]]) -> None:
        """A program on a host has looked up variables.

        Args:
            host: its name.
            values: by variable, the digest of its value there (:func:`value_digest`); None: it is not set.
        """
        for name, digest in values.items():
            if name not in _BY_DESIGN and not name.startswith(_BY_DESIGN_PREFIXES):
                self._digests.setdefault(name, {})[host] = digest

    def differing(self) -> List[str]:
        """The names of variables that programs have looked up on several hosts, with different results."""
        return sorted(name for name, found in self._digests.items() if len(set(found.values())) > 1)

    def text(self, names: Sequence[str]) -> str:
        """Return what is different, and the options that make it the same; "" without names.

        Args:
            names: some of :meth:`differing`.
        """
        if not names:
            return ""
        shown = names[:_MAX_NAMED]
        parts = [self._part(name) for name in shown]
        more = f" ({len(names) - len(shown)} more differ)" if len(names) > len(shown) else ""
        options = " ".join(f"-x {name}{'' if name in self._environ else '=VALUE'}" for name in shown)
        return (
            f"the program reads variables that are not the same on all hosts: {'; '.join(parts)}{more}. "
            f"All ranks get the same with {options}"
        )

    def _part(self, name: str) -> str:
        """Like ``STEPS is 200 on localhost and not set on jetson1``."""
        own = self._environ.get(name)
        digest = None if own is None else value_digest(own, self._job)
        hosts: Dict[Optional[str], List[str]] = {}
        for host, value in self._digests[name].items():
            hosts.setdefault(value, []).append(host)
        # The value that the launching shell has comes first, and "not set" last.
        order = sorted(hosts, key=lambda value: (value is None, value != digest, hosts[value]))
        texts: List[str] = []
        for value in order:
            if value is None:
                state = "not set"
            elif value == digest and own is not None and is_harmless(name, own):
                state = own
            else:
                state = "another value" if texts else "set"
            texts.append(f"{state} on {', '.join(sorted(hosts[value]))}")
        return f"{name} is {', '.join(texts[:-1])} and {texts[-1]}"


def is_harmless(name: str, value: str) -> bool:
    """Return whether a variable's value may be shown.

    It is short, and nothing about it looks like a secret.
    """
    hidden = _SECRET.search(name) or _LOOKS_RANDOM.search(value)
    return hidden is None and _HARMLESS.match(value) is not None
