"""What ``ringcomm.lightning`` does itself: registration, and the ranks that Lightning is given.

Lightning's classes are stand-ins here; ``test_trainers.py`` runs the strategies with its own.
"""

from __future__ import annotations

import importlib
import sys
from abc import ABC
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

import ringcomm as rc  # noqa: E402
from ringcomm.errors import Misuse  # noqa: E402

PLACES = {
    "lightning": ("lightning.fabric", "lightning.pytorch"),
    "pytorch_lightning": ("lightning_fabric", "pytorch_lightning"),
}
NAMES = ["ddp_ringcomm", "ddp_ringcomm_find_unused_parameters_true", "fsdp2_ringcomm"]


class Strategy:
    """Stands for a strategy of Lightning's."""

    def __init__(self, *arguments, **options):
        self.arguments, self.options = arguments, options
        self.cluster_environment = None


class Registry(dict):
    """Stands for a registry of strategies, which refuses a name that is taken."""

    def register(self, name, strategy, description, **options):
        assert name not in self and description
        self[name] = strategy, options


@pytest.fixture
def install(monkeypatch):
    """Imports stand-ins: ``install("lightning")`` returns the registries of Fabric and of the Trainer."""
    for name in ("ringcomm.lightning", *PLACES):
        monkeypatch.delitem(sys.modules, name, raising=False)
    before = vars(rc).get("lightning")

    def imported(package, sharding=True):
        registries, environment = (Registry(), Registry()), type("ClusterEnvironment", (ABC,), {})
        kinds = ["DDPStrategy", *(["ModelParallelStrategy"] if sharding else [])]
        strategies = {kind: type(kind, (Strategy,), {}) for kind in kinds}
        fabric, trainer = PLACES[package]
        for name, items in (
            (package, {}),
            (f"{fabric}.plugins.environments", {"ClusterEnvironment": environment}),
            (f"{fabric}.strategies", {"STRATEGY_REGISTRY": registries[0], **strategies}),
            (f"{trainer}.strategies", {"StrategyRegistry": registries[1], **strategies}),
        ):
            module = ModuleType(name)
            vars(module).update(items)
            monkeypatch.setitem(sys.modules, name, module)
        return registries

    yield imported
    sys.modules.pop("ringcomm.lightning", None)
    vars(rc).pop("lightning", None)
    if before is not None:
        rc.lightning = before


@pytest.fixture
def alone(monkeypatch):
    """A process that no launcher has started, with no group before and none after."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    backends = dist.Backend.default_device_backend_map
    monkeypatch.setitem(backends, "cpu", backends.get("cpu", "gloo"))
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    rc.shutdown()


def ours():
    return importlib.import_module("ringcomm.lightning")


def test_strategies_are_registered_with_each_distribution_that_is_imported(install):
    first = install("pytorch_lightning")
    package = ours()
    for registry in first:
        assert list(registry) == NAMES
        assert all(issubclass(kind, Strategy) for kind, _ in registry.values())
        assert registry[NAMES[1]][1] == {"find_unused_parameters": True} and registry[NAMES[0]][1] == {}
    assert list(first[0][NAMES[2]][1]) == ["parallelize_fn"] and first[1][NAMES[2]][1] == {}
    second = install("lightning", sharding=False)
    assert package.register() == ["lightning", "pytorch_lightning"]
    assert [len(registry) for registry in (*first, *second)] == [3, 3, 2, 2]


def test_without_lightning_the_error_says_how_to_install_it(install):
    install("lightning")
    lightning = ours()
    with pytest.MonkeyPatch.context() as patched:
        patched.delitem(sys.modules, "lightning")
        patched.setattr(lightning, "find_spec", lambda package: None)
        with pytest.raises(ImportError, match="not installed here.* -m pip install lightning"):
            lightning.register()


def test_the_environment_is_that_of_the_default_group(install, alone):
    install("lightning")
    kind = ours().RingcommEnvironment
    assert not kind.detect()
    environment = kind()
    assert kind.detect() and environment.creates_processes_externally
    assert (environment.world_size(), environment.global_rank()) == (1, 0)
    assert (environment.local_rank(), environment.node_rank()) == (0, 0)
    assert (environment.main_address, environment.main_port) == ("127.0.0.1", 0)
    with pytest.raises(ValueError, match="write devices=1, num_nodes=1"):
        environment.validate_settings(2, 1)
    environment.set_world_size(7)
    environment.teardown()
    assert environment.world_size() == 1 and kind.detect(), "the group is left to what follows"
    dist.destroy_process_group()
    environment.set_global_rank(0)
    assert dist.get_backend() == "ringcomm"


def test_a_strategy_has_one_device_per_rank(install, alone):
    (_, registry), cpu = install("lightning"), torch.device("cpu")
    ours()
    kind, options = registry[NAMES[1]]
    strategy = kind("an argument", **options)
    assert strategy.arguments == ("an argument",)
    assert strategy.options == {"process_group_backend": "ringcomm", "find_unused_parameters": True}
    assert strategy.cluster_environment.world_size() == strategy.num_nodes == 1
    strategy.num_nodes = 5
    assert strategy.num_nodes == 1 and strategy.local_rank == 0
    for devices in (None, [cpu]):
        strategy.parallel_devices = devices
        assert strategy.parallel_devices == devices
    assert strategy.root_device == cpu
    with pytest.raises(Misuse, match=r"devices=2, but this job has 1 rank\(s\).* ringrun -np 2"):
        strategy.parallel_devices = [cpu, cpu]
