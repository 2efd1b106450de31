"""A module imports only from lower levels and from earlier siblings."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Dict, Iterator, List, Set, Tuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ringcomm"
LAUNCHER = ROOT / "launcher" / "ringrun"

LEVELS: Dict[int, List[List[str]]] = {
    # Each list is one family of siblings, every one of which may import those before it.
    0: [
        [
            "version", "errors", "ops", "dtypes", "certificate", "keys", "newkey", "endpoints", "values",
            "misspelt", "config", "clock",
        ],
    ],
    1: [
        ["wire.frames", "wire.auth", "wire.messages"],
        [
            "schedule.steps", "schedule.streams", "schedule.ring", "schedule.direct", "schedule.doubling",
            "schedule.tree", "schedule.hierarchy", "schedule.verify", "schedule.cost", "schedule.shares",
            "schedule.sounding", "schedule.choose", "schedule.select",
        ],
    ],
    2: [
        [
            "transport.base", "transport.subset", "transport.memory", "transport.secure", "transport.tls",
            "transport.encryption", "transport.pages", "transport.tcp", "transport.framed", "transport.shm",
            "transport.vm",
            "transport.local", "transport.nics", "transport.routes", "transport.reactor",
            "transport.allowance", "transport.connect", "transport.accept",
        ],
    ],
    3: [
        [
            "collective.reduce", "collective.flows", "collective.progress", "collective.sites",
            "collective.execute", "collective.short", "collective.drive", "collective.calls",
            "collective.journal", "collective.reporting", "collective.runner",
            "collective.measure",
        ],
        [
            "rendezvous.actions", "rendezvous.roster", "rendezvous.blame", "rendezvous.routing",
            "rendezvous.table", "rendezvous.waiting", "rendezvous.state", "rendezvous.probe",
            "rendezvous.mesh",
            "rendezvous.control", "rendezvous.reach", "rendezvous.client", "rendezvous.serving",
            "rendezvous.server", "rendezvous.embedded", "rendezvous.__main__",
        ],
    ],
    4: [
        [
            "engine.request", "engine.journal", "engine.observe", "engine.carried", "engine.cache",
            "engine.disagree", "engine.fusion", "engine.coordinator", "engine.tuning",
            "engine.process_sets", "engine.adasum", "engine.perform", "engine.mailbox", "engine.liveness",
            "engine.stacks", "engine.pending", "engine.tracing", "engine.alone", "engine.standing",
            "engine.lines",
            "engine.waiters", "engine.turns", "engine.loop", "engine.engine", "engine.vigil",
        ],
        ["arrays.bridge", "arrays.rows"],
    ],
    5: [
        [
            "timeline", "flight", "collectives", "program", "context", "api", "process_set", "named", "same",
            "__init__",
        ],
    ],
    6: [
        [
            "_adapter.arguments", "_adapter.basics", "_adapter.common", "_adapter.compression",
            "_adapter.gradients", "_adapter.names", "_adapter.host", "_adapter.callbacks", "_adapter.objects",
            "_adapter.sampling", "_adapter.trees", "_adapter.elastic", "_adapter.parts", "_adapter.checking",
            "_adapter.registry", "_adapter.compute",
        ],
    ],
    7: [
        [
            "torch.tensors", "torch.compression", "torch.handles", "torch.collectives", "torch.state",
            "torch.sync_batch_norm", "torch.buckets", "torch.reducer", "torch.optimizer", "torch.elastic",
            "torch.__init__",
            "tensorflow.bridge", "tensorflow.compression", "tensorflow.flow", "tensorflow.collectives",
            "tensorflow.functions", "tensorflow.elastic", "tensorflow.gradients", "tensorflow.tape",
            "tensorflow.sync_batch_norm", "tensorflow.legacy",
            "keras.how", "keras.on_tensorflow", "keras.on_torch", "keras.on_jax",
            "keras.backends",
            "keras.values", "keras.optimizer", "keras.models", "keras.callbacks", "keras.elastic",
            "keras.__init__",
            "tensorflow.optimizer", "tensorflow.__init__",
            "tensorflow.keras.callbacks", "tensorflow.keras.elastic",
            "tensorflow.keras.models", "tensorflow.keras.__init__",
            "tensorflow.data.__init__", "tensorflow.data.compute_service", "tensorflow.data.compute_worker",
        ],
        [
            "testing.faulty", "testing.reference", "testing.simulation", "testing.driving",
            "testing.contract", "testing.cluster",
        ],
        [
            "torch.distributed._version",
            "torch.distributed._bridge", "torch.distributed._work", "torch.distributed._lane",
            "torch.distributed._matching", "torch.distributed._channel", "torch.distributed._post",
            "torch.distributed._reductions", "torch.distributed._collectives", "torch.distributed._store",
            "torch.distributed._watch", "torch.distributed._monitored", "torch.distributed._face",
            "torch.distributed._trace", "torch.distributed._company",
            "torch.distributed._group", "torch.distributed._rendezvous", "torch.distributed.__init__",
        ],
    ],
}  # fmt: skip

ADAPTERS = {
    "torch": {"torch"},
    "distributed": {"torch"},
    "tensorflow": {"tensorflow"},
    "keras": {"keras", "torch", "jax"},
}
"""Packages on level 7 that translate, and for which frameworks; users import the packages themselves."""

FRAMEWORKS = ("torch", "tensorflow", "keras", "jax", "mxnet", "cupy", "lightning")

LAZY_STEP_UP = ("api", "ringrun.function")
"""The one exception: ``ringcomm.run`` imports the launcher when it is called."""

PURE = [
    "errors", "ops", "dtypes", "values", "misspelt",
    "wire.frames", "wire.auth", "wire.messages", "schedule.*",
    "collective.reduce", "transport.allowance", "transport.routes",
    "rendezvous.actions", "rendezvous.roster", "rendezvous.blame",
    "rendezvous.routing", "rendezvous.table", "rendezvous.waiting", "rendezvous.state", "engine.cache",
    "engine.carried",
    "engine.disagree",
    "engine.fusion", "engine.coordinator", "engine.process_sets", "engine.pending", "engine.tuning",
    "engine.liveness", "engine.standing", "collective.progress", "_adapter.arguments", "_adapter.compression",
    "_adapter.gradients", "_adapter.names", "_adapter.sampling", "_adapter.trees",
    "_adapter.registry",
    "torch.distributed._matching",
]  # fmt: skip
IMPURE_MODULES = {
    "socket",
    "select",
    "selectors",
    "threading",
    "time",
    "subprocess",
    "psutil",
    "asyncio",
    "queue",
}

PLACE: Dict[str, Tuple[int, int, int]] = {
    name: (level, family, place)
    for level, families in LEVELS.items()
    for family, names in enumerate(families)
    for place, name in enumerate(names)
}


def modules() -> Dict[str, Path]:
    """Every module of ringcomm by its name without ``ringcomm.``; packages as such count as data-free."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        if not name.endswith(".__init__") or name.split(".")[0] in ("__init__", *ADAPTERS):
            found[name] = path
    return found


def imports(path: Path, package: str) -> Iterator[str]:
    """Full names of everything a file imports, at whatever depth, in functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = parts[: len(parts) - node.level + 1] if node.level else []
            origin = ".".join(base + ([node.module] if node.module else []))
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def imported_by(name: str) -> Set[str]:
    """The modules of ringcomm, and other top-level modules, that a module imports."""
    path = modules()[name]
    package = ".".join(["ringcomm", *name.split(".")[:-1]])
    found = set()
    for full in imports(path, package):
        if full.split(".")[0] != "ringcomm":
            found.add(full)
            continue
        inside = full[len("ringcomm.") :]
        # ``from .steps import Step`` names a thing inside a module, ``from . import ring`` a module.
        while inside and inside not in PLACE:
            inside = inside.rpartition(".")[0]
        found.add("ringcomm." + (inside or "__init__"))
    return found


def may_import(name: str, other: str) -> bool:
    """Whether the table allows ``name`` to import ``other``."""
    level, family, place = PLACE[name]
    other_level, other_family, other_place = PLACE[other]
    if level == other_level:
        return family == other_family and other_place < place
    return other_level < level


def test_every_module_has_its_place():
    assert sorted(modules()) == sorted(PLACE), "put new modules into the table above"


@pytest.mark.parametrize("name", sorted(PLACE))
def test_imports_only_from_below_or_before(name):
    inner = [other[len("ringcomm.") :] for other in imported_by(name) if other.startswith("ringcomm.")]
    assert [other for other in sorted(inner) if not may_import(name, other)] == []


def test_the_launcher_is_imported_in_one_place_and_lazily():
    found = [
        (name, other)
        for name in modules()
        for other in imported_by(name)
        if other.split(".")[0] in ("ringrun", "launcher")
    ]
    assert found == [(LAZY_STEP_UP[0], LAZY_STEP_UP[1] + ".run_function")]
    tree = ast.parse(modules()["api"].read_text())
    at_top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert not any("ringrun" in ast.dump(node) for node in at_top)


@pytest.mark.parametrize("pattern", PURE)
def test_pure_modules_touch_no_socket_thread_or_clock(pattern):
    names = [name for name in PLACE if Path(name).match(pattern)]
    assert names
    for name in names:
        tops = {other.split(".")[0] for other in imported_by(name)}
        assert tops & IMPURE_MODULES == set(), name


def test_packages_are_empty_shells():
    for path in PACKAGE.rglob("__init__.py"):
        if path.parent != PACKAGE and path.parent.name not in ADAPTERS:
            assert list(imports(path, "ringcomm")) == [], path


def test_the_environment_is_read_in_one_place():
    readers = [
        name
        for name, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    ]
    assert set(readers) == {"config"}


def test_the_library_does_not_print_exit_or_configure():
    programs = {"config", "newkey", "rendezvous.__main__"}
    for name, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if name not in programs and isinstance(node, ast.Call):
                called = ast.unparse(node.func) if hasattr(ast, "unparse") else ""
                assert called not in ("print", "exit", "sys.exit", "os._exit", "signal.signal"), name
                assert called != "logging.basicConfig", name


def test_no_pickle_but_for_the_users_objects():
    users = {name for name in modules() for other in imported_by(name) if "pickle" in other}
    assert users <= {"collectives", "_adapter.objects"}


@pytest.mark.parametrize("name", sorted(PLACE))
def test_frameworks_are_imported_by_their_own_adapters_only(name):
    found = {other.split(".")[0] for other in imported_by(name)} & set(FRAMEWORKS)
    assert found <= ADAPTERS.get(name.split(".")[0], set())
    assert len(found) <= 1, "one framework in a file"


# ---- the launcher ----------------------------------------------------------------------------


def launcher_graph() -> Dict[str, Set[str]]:
    """Which modules of ringrun import which."""
    names = {path.stem: path for path in LAUNCHER.glob("*.py")}
    graph = {}
    for name, path in names.items():
        inner = {full.split(".")[1] for full in imports(path, "ringrun") if full.startswith("ringrun.")}
        graph[name] = inner & set(names)
    return graph


def test_the_launchers_modules_import_each_other_in_one_direction():
    graph = launcher_graph()
    done: Set[str] = set()
    while len(done) < len(graph):
        ready = {name for name in graph if name not in done and graph[name] <= done}
        assert ready, f"these import each other in a circle: {sorted(set(graph) - done)}"
        done |= ready


def test_the_launcher_knows_nothing_of_collectives():
    """It shares the configuration, the wire and the rendezvous with the core, and nothing above."""
    for path in LAUNCHER.glob("*.py"):
        for full in imports(path, "ringrun"):
            if full.startswith("ringcomm."):
                inside = full[len("ringcomm.") :]
                above = ("collective", "collectives", "schedule", "arrays", "context", "api")
                assert inside.split(".")[0] not in above, (path.name, full)
