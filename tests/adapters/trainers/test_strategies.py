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

OWN = ("ringcomm.lightning", "ringcomm.lightning._job_ranks", "ringcomm.lightning._registration")
PLACES = {
    "lightning": ("lightning.fabric", "lightning.pytorch"),
    "pytorch_lightning": ("lightning_fabric", "pytorch_lightning"),
}


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


class Installed:
    """A distribution of Lightning, imported; of Fabric and of the Trainer it has the registries."""

    def __init__(self, monkeypatch, package, sharding=True):
        self.fabric, self.trainer = Registry(), Registry()
        self.environment = type("ClusterEnvironment", (ABC,), {})
        kinds = ["DDPStrategy", *(["ModelParallelStrategy"] if sharding else [])]
        strategies = {kind: type(kind, (Strategy,), {}) for kind in kinds}
        fabric, trainer = PLACES[package]
        for name, items in (
            (package, {}),
            (f"{fabric}.plugins.environments", {"ClusterEnvironment": self.environment}),
            (f"{fabric}.strategies", {"STRATEGY_REGISTRY": self.fabric, **strategies}),
            (f"{trainer}.strategies", {"StrategyRegistry": self.trainer, **strategies}),
        ):
            module = ModuleType(name)
            vars(module).update(items)
            monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def install(monkeypatch):
    """Imports stand-ins: ``install("lightning")``. Before, nothing of Lightning's and of ours is imported."""
    for name in (*OWN, *PLACES):
        monkeypatch.delitem(sys.modules, name, raising=False)
    before = vars(rc).get("lightning")
    yield lambda package, **options: Installed(monkeypatch, package, **options)
    for name in OWN:
        sys.modules.pop(name, None)
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


class TestRegistration:
    def test_importing_it_registers_the_strategies(self, install):
        lightning = install("lightning")
        environment = ours().RingcommEnvironment
        assert issubclass(environment, lightning.environment)
        names = ["ddp_ringcomm", "ddp_ringcomm_find_unused_parameters_true", "fsdp2_ringcomm"]
        assert list(lightning.fabric) == list(lightning.trainer) == names
        for registry in (lightning.fabric, lightning.trainer):
            kinds = [kind.__name__ for kind, _ in registry.values()]
            assert kinds == ["RingcommDDPStrategy"] * 2 + ["RingcommModelParallelStrategy"]
            assert all(issubclass(kind, Strategy) for kind, _ in registry.values())
            assert registry[names[1]][1] == {"find_unused_parameters": True} and registry[names[0]][1] == {}
        assert list(lightning.fabric[names[2]][1]) == ["parallelize_fn"]
        assert lightning.trainer[names[2]][1] == {}

    def test_another_distribution_may_be_imported_later(self, install):
        first = install("pytorch_lightning")
        package = ours()
        assert package.register() == ["pytorch_lightning"] and len(first.trainer) == 3
        second = install("lightning", sharding=False)
        assert package.register() == ["lightning", "pytorch_lightning"]
        assert len(first.trainer) == 3 and len(second.trainer) == len(second.fabric) == 2

    def test_without_lightning_the_error_says_how_to_install_it(self, install):
        install("lightning")
        registration = importlib.import_module("ringcomm.lightning._registration")
        with pytest.MonkeyPatch.context() as patched:
            patched.delitem(sys.modules, "lightning")
            patched.setattr(registration, "find_spec", lambda package: None)
            with pytest.raises(ImportError, match="not installed here.* -m pip install lightning"):
                registration.register()
            patched.setattr(registration, "find_spec", lambda package: package == "lightning" or None)
            assert registration.register() == ["lightning"], "it is installed, and imported for that"


class TestRanks:
    def test_the_environment_is_that_of_the_default_group(self, install, alone):
        install("lightning")
        kind = ours().RingcommEnvironment
        assert not kind.detect()
        environment = kind()
        assert kind.detect() and environment.creates_processes_externally
        assert (environment.world_size(), environment.global_rank()) == (1, 0)
        assert (environment.local_rank(), environment.node_rank()) == (0, 0)
        assert (environment.main_address, environment.main_port) == ("127.0.0.1", 0)
        environment.validate_settings(1, 1)
        for devices, nodes in ((2, 1), (1, 2)):
            with pytest.raises(ValueError, match="write devices=1, num_nodes=1"):
                environment.validate_settings(devices, nodes)
        environment.set_world_size(7)
        environment.teardown()
        assert environment.world_size() == 1 and kind.detect(), "the group is left to what follows"

    def test_a_group_that_was_destroyed_is_made_again(self, install, alone):
        install("lightning")
        environment = ours().RingcommEnvironment()
        dist.destroy_process_group()
        environment.set_global_rank(0)
        assert dist.get_backend() == "ringcomm"

    def test_a_strategy_has_one_device_per_rank(self, install, alone):
        registry, cpu = install("lightning").trainer, torch.device("cpu")
        ours()
        kind, options = registry["ddp_ringcomm_find_unused_parameters_true"]
        strategy = kind("an argument", **options)
        assert strategy.arguments == ("an argument",)
        assert strategy.options == {"process_group_backend": "ringcomm", "find_unused_parameters": True}
        assert strategy.cluster_environment.world_size() == strategy.num_nodes == 1
        strategy.num_nodes = 5
        assert strategy.num_nodes == 1 and strategy.local_rank == 0
        assert strategy.parallel_devices is None
        strategy.parallel_devices = [cpu]
        assert strategy.parallel_devices == [cpu] and strategy.root_device == cpu
        with pytest.raises(Misuse, match=r"devices=2, but this job has 1 rank\(s\).* ringrun -np 2"):
            strategy.parallel_devices = [cpu, cpu]
        strategy.parallel_devices = None
        assert strategy.parallel_devices is None

    def test_sharding_leaves_no_parameter_whole(self, install, alone):
        fsdp = pytest.importorskip("torch.distributed.fsdp")
        if not hasattr(fsdp, "fully_shard"):
            pytest.skip("this version of PyTorch has no FSDP2")
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor

        install("lightning")
        ours().RingcommEnvironment()
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("data_parallel",))
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1))
        shard = importlib.import_module("ringcomm.lightning._job_ranks").shard
        assert shard(model, mesh) is model
        assert [isinstance(item, DTensor) for item in model.parameters()] == [True] * 4
