"""The backends of Ray Train for a group of one worker, which is this process."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, Callable, List

import pytest

import ringcomm as rc
from ringcomm._adapter import placed
from ringcomm.config import Settings
from ringcomm.configuration import membership as environment
from ringcomm.storage.keys import read_key

pytest.importorskip("ray.train.torch")


class Group:
    """Ray Train's group of workers: this process."""

    def __len__(self) -> int:
        return 1

    def execute(self, function: Callable[..., Any], *arguments: Any) -> List[Any]:
        return [function(*arguments)]

    def execute_single_async(self, rank: int, function: Callable[..., Any], *arguments: Any) -> Any:
        assert rank == 0
        return function(*arguments)


def test_a_job_is_opened_for_every_start_of_a_group_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    from ringcomm.ray import RingcommConfig, train

    runtime = SimpleNamespace(get_node_id=lambda: "node")
    monkeypatch.setattr(train, "ray", SimpleNamespace(get=list, get_runtime_context=lambda: runtime))
    closed: List[str] = []
    monkeypatch.setattr(train.PlacedJob, "close", lambda job: closed.append(job.id))
    config, group = RingcommConfig(), Group()
    backend = config.backend_cls()
    for start in range(2):
        backend.on_start(group, config)
        rc.init()
        assert (rc.rank(), rc.size()) == (0, 1)
        placed.end()  # as when Ray replaces the worker
        assert len(closed) == start
    backend.on_shutdown(group, config)
    backend.on_shutdown(group, config)
    assert len(set(closed)) == 2 and group not in train._jobs
    assert config.to_dict() == {}
    assert RingcommConfig(Settings(start_timeout_s=7.0)).to_dict() == {"RINGCOMM_START_TIMEOUT": "7.0"}


@pytest.mark.parametrize("encrypt", [False, True])
def test_every_start_of_a_process_group_has_a_key_of_its_own(
    encrypt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ringcomm.ray import TorchConfig

    config = TorchConfig(settings=Settings(encrypt=True) if encrypt else None)
    backend = config.backend_cls()
    started: List[Any] = []
    monkeypatch.setattr(
        type(backend).__mro__[1], "on_start", lambda self, group, config: started.append(config.backend)
    )
    monkeypatch.setattr(type(backend).__mro__[1], "on_shutdown", lambda self, group, config: None)
    keys = []
    for _ in range(2):
        backend.on_start(Group(), config)
        keys.append(read_key(None, "", environment.variables(None)["RINGCOMM_KEY"]))
    assert "RINGCOMM_KEY" not in os.environ
    backend.on_shutdown(Group(), config)
    assert "RINGCOMM_KEY" not in environment.variables(None), "Ray uses the worker again"
    assert started == ["ringcomm"] * 2 and keys[0][0] != keys[1][0]
    assert [("BEGIN CERTIFICATE" in certificate) for _, certificate in keys] == [encrypt] * 2
