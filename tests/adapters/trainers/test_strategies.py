"""How ``ringcomm.lightning`` registers its strategies, with stand-ins for Lightning's classes.

``test_trainers.py`` runs them with Lightning's own.
"""

from __future__ import annotations

import importlib
import sys
from abc import ABC
from types import ModuleType

import pytest

pytest.importorskip("torch")

import ringcomm as rc  # noqa: E402

PLACES = {
    "lightning": ("lightning.fabric", "lightning.pytorch"),
    "pytorch_lightning": ("lightning_fabric", "pytorch_lightning"),
}
NAMES = ["ddp_ringcomm", "ddp_ringcomm_find_unused_parameters_true", "fsdp2_ringcomm"]


class Strategy:
    """Stands for a strategy of Lightning's."""


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
