"""The core (what a collective, a start and a failure need) imports no companion."""

from __future__ import annotations

import importlib

from ringcomm.config import Settings
from ringcomm.job.context import COMPANIONS
from tests.test_layers import PLACE, imported_by

ROOMS = {
    "balance", "scaling", "data_service", "ray", "dask", "spark", "lightning", "mxnet", "_tensorflow",
    "tensorflow", "keras", "jax", "mlx", "testing",
}  # fmt: skip
"""Rooms and modules of companions."""


def room(module: str) -> str:
    return module.split(".")[0]


def test_the_core_imports_no_companion():
    core = [name for name in PLACE if PLACE[name][0] <= 5 and room(name) not in ROOMS]
    assert {"api", "job.context", "engine.thread", "rendezvous.server"} <= set(core)
    found = [
        (name, other)
        for name in core
        for other in imported_by(name)
        if other.startswith("ringcomm.") and room(other[len("ringcomm.") :]) in ROOMS
    ]
    assert found == []


def test_what_a_setting_turns_on_is_there():
    assert "predict" in COMPANIONS
    for setting, module in COMPANIONS.items():
        assert hasattr(Settings(), setting)
        assert room(module[len("ringcomm.") :]) in ROOMS
        assert callable(importlib.import_module(module).attach)
