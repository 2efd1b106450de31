"""The rooms of the launcher: each imports in one direction only."""

from __future__ import annotations

from pathlib import Path
from typing import Dict, Set

from tests.test_layers import LAUNCHER, cycle, imports

ROOMS = ("plan", "elastic", "agent", "ship", "reach", "diagnosis", "show", "watch", "job", "doctor")
"""The packages of ringrun; a package imports only from those before it."""


def launcher_modules() -> Dict[str, Path]:
    """Every module of ringrun by its name without ``ringrun.``."""
    found = {}
    for path in sorted(LAUNCHER.rglob("*.py")):
        parts = path.relative_to(LAUNCHER).with_suffix("").parts
        if "horovod_shim" not in parts and parts[-1] != "__init__":
            found[".".join(parts)] = path
    return found


def launcher_graph() -> Dict[str, Set[str]]:
    """Return which modules of ringrun import which."""
    names = launcher_modules()
    graph = {}
    for name, path in names.items():
        inner = set()
        for full in imports(path, ".".join(["ringrun", *name.split(".")[:-1]])):
            inside = full[len("ringrun.") :] if full.startswith("ringrun.") else ""
            while inside and inside not in names:
                inside = inside.rpartition(".")[0]
            inner.add(inside)
        graph[name] = inner - {""}
    return graph


def test_the_launchers_modules_import_each_other_in_one_direction():
    assert cycle(launcher_graph()) == set()


def test_the_launchers_packages_import_each_other_in_one_direction():
    for name, others in launcher_graph().items():
        room = name.split(".")[0] if "." in name else None
        for other in others:
            above = other.split(".")[0] if "." in other else None
            if room is not None and room != above:
                assert above is not None and ROOMS.index(above) < ROOMS.index(room), (name, other)


def test_the_launcher_imports_no_collectives():
    """It shares the configuration, the wire and the rendezvous with the core, and nothing above."""
    for name, path in launcher_modules().items():
        for full in imports(path, ".".join(["ringrun", *name.split(".")[:-1]])):
            if full.startswith("ringcomm."):
                inside = full[len("ringcomm.") :]
                above = ("collective", "calls", "schedule", "arrays", "job", "api")
                assert inside.split(".")[0] not in above, (name, full)
