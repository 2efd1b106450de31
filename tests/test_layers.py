"""A module imports only from lower levels and from earlier siblings."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import lru_cache
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
            "version", "errors", "ops", "dtypes", "storage.folders", "storage.files", "storage.certificate",
            "storage.keys", "newkey", "configuration.endpoints", "configuration.parsing",
            "configuration.bucket_sizes", "configuration.unknown_settings", "configuration.setting_aliases",
            "configuration.variables", "configuration.other_launchers", "configuration.environment",
            "configuration.settings", "configuration.membership", "configuration.limits",
            "configuration.without_effect", "config", "configuration.lookups", "configuration.polling",
            "clock", "docstrings", "storage.unpickling", "storage.results", "calls.exports",
        ],
    ],
    1: [
        ["group.view", "group.failures"],
        ["codec.base", "codec.halves", "codec.quantized", "codec.table"],
        ["wire.frames", "wire.signature", "wire.place", "wire.signing", "wire.claims", "wire.auth",
         "wire.messages"],
        [
            "schedule.steps", "schedule.streams", "schedule.registry", "schedule.ring", "schedule.direct",
            "schedule.doubling", "schedule.tree", "schedule.hierarchy",
            "schedule.algorithms", "schedule.cost", "schedule.shares",
            "schedule.calibration", "schedule.choose", "schedule.select",
            "schedule.machine", "schedule.closed_form",
        ],
    ],
    2: [
        [
            "transport.base", "transport.subset", "transport.memory", "transport.secure", "transport.tls",
            "transport.encryption", "transport.huge_pages", "transport.wake_up", "transport.tcp",
            "transport.views", "transport.ring", "transport.span", "transport.shm", "transport.arena",
            "transport.lending", "transport.process_memory", "transport.carriers", "transport.local",
            "transport.kinds", "transport.nics", "transport.routes", "transport.pace", "transport.reactor",
            "transport.refusals", "transport.connect", "transport.accept", "group.reporter",
        ],
    ],
    3: [
        [
            "collective.reduce", "collective.options", "collective.rows", "collective.flows",
            "collective.call_sites", "collective.headers",
            "collective.progress", "collective.part", "collective.execute", "collective.device_group",
            "collective.mirror", "collective.short", "collective.drive", "collective.placement",
            "collective.coded_hosts", "collective.coded", "collective.call_history",
            "collective.totals", "collective.plans",
            "collective.call_errors", "collective.call_runner",
            "collective.host_groups", "collective.runner", "collective.weighted",
            "collective.codec_rates", "collective.measure",
        ],
        [
            "rendezvous.actions", "rendezvous.membership", "rendezvous.root_cause", "rendezvous.routing",
            "rendezvous.member_list", "rendezvous.listening",
            "rendezvous.link_table", "rendezvous.linking", "rendezvous.remarks", "rendezvous.epoch",
            "rendezvous.processes", "rendezvous.pings", "rendezvous.losses", "rendezvous.joining",
            "rendezvous.terms", "rendezvous.fixed_terms", "rendezvous.elastic_notices",
            "rendezvous.elastic_terms", "rendezvous.state",
            "rendezvous.meter",
            "rendezvous.echo", "rendezvous.race", "rendezvous.probe", "rendezvous.probing",
            "rendezvous.relay", "rendezvous.links", "rendezvous.relayed_start", "rendezvous.aborts",
            "rendezvous.changes", "rendezvous.control", "rendezvous.channels", "rendezvous.joined",
            "rendezvous.connect_server", "rendezvous.client", "rendezvous.posting",
            "rendezvous.board",
            "rendezvous.message_server", "rendezvous.server",
            "rendezvous.embedded", "rendezvous.pmi", "rendezvous.launched", "rendezvous.__main__",
        ],
    ],
    4: [
        [
            "engine.request", "engine.mirrors", "engine.operation_history", "engine.observer", "engine.cache",
            "engine.announcements", "engine.piggyback", "engine.mismatch", "engine.deadlocks",
            "engine.fusion", "engine.process_sets", "engine.coordinator", "engine.tuning", "engine.adasum",
            "engine.packing", "engine.bucket_runner", "engine.control_messages",
            "engine.failure_detector", "engine.stacks", "engine.pending", "engine.tracing",
            "engine.single_rank", "engine.progress_reports", "engine.peer_channels", "engine.waiters",
            "engine.cycle", "engine.thread", "engine.core", "engine.engine", "engine.heartbeat",
        ],
        [
            "arrays.kinds", "arrays.bridge", "arrays.mirrors", "arrays.mapped", "arrays.operands",
            "arrays.nccl", "arrays.torch_tensors", "arrays.cupy_arrays", "arrays.dlpack",
        ],
        ["scaling.step", "scaling.figure", "scaling.prediction", "scaling.recorder", "scaling.job"],
        ["balance.plan", "balance.order", "balance.division", "balance.replan", "balance.step_weight",
         "balance.unequal", "balance.window", "balance.advise", "balance.probe"],
        [
            "group.work", "group.message_history", "group.message_matching", "group.message_coding",
            "group.message_channel", "group.abort_watch", "group.turn", "group.operation_queue",
            "group.point_to_point",
        ],
    ],
    5: [
        [
            "job.activity", "job.timeline", "job.flight_recorder", "group.group", "calls.objects",
            "calls.collectives", "job.program", "job.preparation", "job.entry", "job.context", "job.newcomer",
            "job.default_context", "api", "calls.process_set", "calls.async_calls", "calls.direct",
            "calls.grouped_calls", "calls.messages", "calls.consistency", "balance.pace", "balance.batches",
        ],
    ],
    6: [
        [
            "_adapter.arguments", "_adapter.basics", "_adapter.objects", "_adapter.compression",
            "_adapter.common", "_adapter.horovod_basics", "_adapter.intervals", "_adapter.choice",
            "_adapter.feedback", "_adapter.powersgd", "_adapter.gradients", "_adapter.optimizer_classes",
            "_adapter.names", "_adapter.causes", "_adapter.waiting",
            "_adapter.reduction", "_adapter.submit", "_adapter.compressed",
            "_adapter.graph_callbacks", "_adapter.calls_in_order",
            "_adapter.callbacks",
            "_adapter.fragments", "_adapter.outer", "_adapter.local_sgd", "_adapter.late_broadcast",
            "_adapter.trees", "_adapter.tree_collectives", "_adapter.checking",
            "elastic.sampler", "elastic.state", "elastic.samples", "elastic.parts", "elastic.arrays",
            "elastic.__init__", "__init__",
        ],
        ["data_service.registry", "data_service.service"],
        ["_adapter.placed"],
    ],
    7: [
        [
            "torch.tensors", "torch.compression", "torch.movement", "torch.handles",
            "torch.autograd", "torch.collectives", "torch.mpi_ops", "torch.state",
            "torch.sync_batch_norm", "torch.buckets", "torch.compressed_buckets",
            "torch.reducer", "torch.own_optimizer", "torch.local_sgd", "torch.local_optimizer",
            "torch.optimizer", "torch.cross_barrier", "torch.elastic", "torch.mpi_ops",
            "torch.__init__",
        ],
        [
            "_tensorflow.bridge", "_tensorflow.gradients",
            "_tensorflow.accumulation", "_tensorflow.legacy",
        ],
        [
            "jax.requirement", "jax.host_call", "jax.io_callbacks", "jax.buffers", "jax.mechanism",
            "jax.eager", "jax.started", "jax.primitive", "jax.programs",
            "jax.collectives", "jax.gradients", "jax.optimizer", "jax.state", "jax.local_sgd", "jax.ending",
            "jax.cluster", "jax.__init__",
        ],
        [
            "keras.on_tensorflow", "keras.on_torch", "keras.on_jax",
            "keras.backends", "keras.balanced", "keras.collectives", "keras.optimizer", "keras.models",
            "keras.callbacks", "keras.local_sgd", "keras.elastic", "keras.__init__",
        ],
        [
            "tensorflow.flow", "tensorflow.balanced", "tensorflow.movement", "tensorflow.collectives",
            "tensorflow.functions", "tensorflow.elastic", "tensorflow.tape", "tensorflow.sync_batch_norm",
            "tensorflow.optimizer", "tensorflow.compression", "tensorflow.mpi_ops", "tensorflow.util",
            "tensorflow.__init__", "tensorflow.keras.collectives",
            "tensorflow.keras.callbacks", "tensorflow.keras.elastic", "tensorflow.keras.models",
            "tensorflow.keras.__init__", "tensorflow.data.__init__", "tensorflow.data.servers",
            "tensorflow.data.compute_service", "tensorflow.data.compute_worker",
        ],
        ["ray.settings", "ray.workers", "ray.executor", "ray.train", "ray.torch_config", "ray.__init__"],
        ["dask"], ["spark"],
        [
            "mxnet.arrays", "mxnet.compression", "mxnet.reductions", "mxnet.movement", "mxnet.mpi_ops",
            "mxnet.parameters", "mxnet.reducer", "mxnet.optimizer", "mxnet.trainer", "mxnet.__init__",
        ],
        ["mlx.arrays", "mlx.collectives", "mlx.training", "mlx.__init__"],
        ["testing.faulty", "testing.driving", "testing.contract", "testing.cluster"],
        [
            "torch.distributed._version", "torch.distributed._bridge", "torch.distributed._staged",
            "torch.distributed._uncompiled", "torch.distributed._work",
            "torch.distributed._elements", "torch.distributed._dispatch",
            "torch.distributed._reductions",
            "torch.distributed._collectives", "torch.distributed._store", "torch.distributed._steps",
            "torch.distributed._monitored",
            "torch.distributed._arguments", "torch.distributed._trace", "torch.distributed._pipelines",
            "torch.distributed._group_transport", "torch.distributed._operations", "torch.distributed._group",
            "torch.distributed._hooks",
            "torch.distributed._rendezvous", "torch.distributed._weighted",
            "torch.distributed._unsynchronized", "torch.distributed._start", "torch.distributed.__init__",
        ],
        ["lightning._job_ranks", "lightning._registration", "lightning.__init__"],
    ],
}  # fmt: skip

ACROSS = {
    "lightning": {"torch"},
    "keras": {"torch", "jax", "_tensorflow"},
    "tensorflow": {"keras", "_tensorflow"},
}
"""Families of level 7 (by package) whose modules may import those of other packages of the same level. Both
directions between two packages would be a cycle; `test_adapter_packages_form_no_cycle` checks that."""

ADAPTERS = {
    "torch": {"torch"},
    "distributed": {"torch"},
    "_tensorflow": {"tensorflow"},
    "jax": {"jax"},
    "tensorflow": {"tensorflow"},
    "keras": {"keras", "torch", "jax"},
    "mxnet": {"mxnet"},
    "mlx": {"mlx"},
    "lightning": {"torch"},
    "ray": {"ray"},
    "dask": {"distributed"},
    "spark": {"pyspark"},
}
"""Packages on level 7 that translate, and for which frameworks; users import the packages themselves."""

FRAMEWORKS = (
    "torch", "tensorflow", "keras", "jax", "mlx", "mxnet", "cupy", "lightning", "ray", "distributed",
    "pyspark",
)  # fmt: skip

LAZY_STEP_UP = "ringrun.function"
"""The one exception: ``ringcomm.run`` is a name of the launcher, which is imported when it is used."""

PURE = [
    "errors", "ops", "dtypes", "configuration.parsing", "configuration.unknown_settings",
    "configuration.bucket_sizes", "configuration.variables", "configuration.other_launchers", "wire.frames",
    "wire.signature", "wire.place", "wire.signing", "wire.claims", "wire.auth", "wire.messages", "codec.*",
    "schedule.*", "collective.reduce",
    "collective.progress", "transport.routes", "rendezvous.actions", "rendezvous.membership",
    "rendezvous.root_cause", "rendezvous.routing", "rendezvous.member_list", "rendezvous.listening",
    "rendezvous.link_table", "rendezvous.linking", "rendezvous.remarks", "rendezvous.epoch",
    "rendezvous.processes", "rendezvous.pings", "rendezvous.losses", "rendezvous.joining", "rendezvous.terms",
    "rendezvous.fixed_terms", "rendezvous.elastic_notices", "rendezvous.elastic_terms", "rendezvous.state",
    "group.view", "group.failures", "rendezvous.aborts", "rendezvous.meter", "rendezvous.board",
    "engine.cache", "engine.piggyback", "engine.mismatch", "engine.deadlocks", "engine.fusion",
    "engine.coordinator", "engine.process_sets", "engine.packing", "engine.pending", "engine.tuning",
    "engine.failure_detector", "engine.progress_reports", "group.message_matching", "_adapter.arguments",
    "_adapter.compression", "_adapter.feedback", "_adapter.powersgd", "_adapter.gradients", "_adapter.names",
    "_adapter.trees", "_adapter.waiting", "elastic.sampler", "data_service.registry",
]  # fmt: skip
IMPURE_MODULES = {
    "socket", "select", "selectors", "threading", "time", "subprocess", "psutil", "asyncio", "queue",
}  # fmt: skip

PLACE: Dict[str, Tuple[int, int, int]] = {
    name: (level, family, place)
    for level, families in LEVELS.items()
    for family, names in enumerate(families)
    for place, name in enumerate(names)
}


@lru_cache(maxsize=None)
def nodes(path: Path) -> List[ast.AST]:
    """Everything in a file; several tests look at all files."""
    return list(ast.walk(ast.parse(path.read_text())))


@lru_cache(maxsize=None)
def modules() -> Dict[str, Path]:
    """Every module of ringcomm by its name without ``ringcomm.``; packages as such count as data-free."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        public = ("__init__", "elastic", *(adapter for adapter in ADAPTERS if not adapter.startswith("_")))
        if not name.endswith(".__init__") or name.split(".")[0] in public:
            found[name] = path
    return found


def imports(path: Path, package: str) -> Iterator[str]:
    """Full names of everything a file imports, at whatever depth, in functions too."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = parts[: len(parts) - node.level + 1] if node.level else []
            origin = ".".join(base + ([node.module] if node.module else []))
            yield from (f"{origin}.{alias.name}" for alias in node.names)


@lru_cache(maxsize=None)
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
    """Return whether the table allows ``name`` to import ``other``."""
    level, family, place = PLACE[name]
    other_level, other_family, other_place = PLACE[other]
    if level == other_level:
        if other.split(".")[0] in ACROSS.get(name.split(".")[0], ()):
            return True
        return family == other_family and other_place < place
    return other_level < level


def test_every_module_has_its_place():
    assert sorted(modules()) == sorted(PLACE), "put new modules into the table above"


@pytest.mark.parametrize("name", sorted(PLACE))
def test_imports_only_from_below_or_before(name):
    inner = [other[len("ringcomm.") :] for other in imported_by(name) if other.startswith("ringcomm.")]
    assert [other for other in sorted(inner) if not may_import(name, other)] == []


def test_adapter_packages_form_no_cycle():
    graph: Dict[str, Set[str]] = {}
    for name in PLACE:
        if PLACE[name][0] == 7:
            own = name.split(".")[0]
            others = {other.split(".")[1] for other in imported_by(name) if other.startswith("ringcomm.")}
            graph.setdefault(own, set()).update(others & (set(ADAPTERS) - {own}))
    assert cycle(graph) == set()
    assert cycle({**graph, "keras": graph["keras"] | {"tensorflow"}}) >= {"keras", "tensorflow"}


def cycle(graph: Dict[str, Set[str]]) -> Set[str]:
    """The nodes that are left when nodes without outgoing edges are taken away again and again."""
    left = {name: set(others) for name, others in graph.items()}
    while True:
        done = {name for name, others in left.items() if not others & set(left)}
        if not done:
            return set(left)
        left = {name: others for name, others in left.items() if name not in done}


def test_the_launcher_is_imported_in_one_place_and_lazily():
    found = [
        (name, other)
        for name in modules()
        for other in imported_by(name)
        if other.split(".")[0] in ("ringrun", "launcher")
    ]
    assert found == []
    texts = {name: path.read_text() for name, path in modules().items()}
    step = f'import_module("{LAZY_STEP_UP}")'
    assert [name for name, text in texts.items() if step in text] == ["__init__"]
    command = "import sys, ringcomm; assert 'ringrun' not in sys.modules; ringcomm.run"
    subprocess.run([sys.executable, "-c", command], check=True)


@pytest.mark.parametrize("pattern", PURE)
def test_pure_modules_touch_no_socket_thread_or_clock(pattern):
    names = [name for name in PLACE if Path(name).match(pattern)]
    assert names
    for name in names:
        tops = {other.split(".")[0] for other in imported_by(name)}
        assert tops & IMPURE_MODULES == set(), name


def test_packages_are_empty_shells():
    for path in PACKAGE.rglob("__init__.py"):
        if path.parent != PACKAGE and path.parent.name not in (*ADAPTERS, "elastic"):
            assert list(imports(path, "ringcomm")) == [], path


def test_the_environment_is_read_in_one_place():
    readers = [
        name
        for name, path in modules().items()
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    ]
    assert set(readers) == {"configuration.environment"}


def test_the_library_does_not_print_exit_or_configure():
    programs = {"config", "newkey", "rendezvous.__main__"}
    for name, path in modules().items():
        for node in nodes(path):
            if name not in programs and isinstance(node, ast.Call):
                called = ast.unparse(node.func) if hasattr(ast, "unparse") else ""
                assert called not in ("print", "exit", "sys.exit", "os._exit", "signal.signal"), name
                assert called != "logging.basicConfig", name


def test_no_pickle_but_for_the_users_objects():
    users = {name for name in modules() for other in imported_by(name) if "pickle" in other}
    assert users == {"calls.objects", "storage.results", "storage.unpickling"}


@pytest.mark.parametrize("name", sorted(PLACE))
def test_frameworks_are_imported_by_their_own_adapters_only(name):
    found = {other.split(".")[0] for other in imported_by(name)} & set(FRAMEWORKS)
    assert found <= ADAPTERS.get(name.split(".")[0], set())
    assert len(found) <= 1, "one framework in a file"
