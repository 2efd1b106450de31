"""ringcomm.jax in one process: its view of the job, the end of the job, programs, and gradients."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402 - these need jax

from ringcomm._adapter.graph_callbacks import Operation  # noqa: E402
from ringcomm._adapter.reduction import Reduction  # noqa: E402
from ringcomm._adapter.submit import cause_of, record_cause  # noqa: E402
from ringcomm.collective.observe import this_site  # noqa: E402
from ringcomm.errors import MismatchError, NotInitializedError, PeerLostError  # noqa: E402
from tests.adapters.signatures import differences_of_options  # noqa: E402


def test_every_function_takes_the_options_of_the_table() -> None:
    import ringcomm.jax as hvd

    assert differences_of_options(hvd, "ringcomm.jax") == []
    with pytest.raises(NotInitializedError):
        hvd.psum(1.0)


def test_a_cluster_is_found_in_the_environment_before_the_job_is_joined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from jax._src.clusters import ClusterEnv

    from ringcomm.jax.collectives import RingcommCluster

    assert ClusterEnv._cluster_types[0] is RingcommCluster, "Slurm's variables would be read first"
    assert ClusterEnv._cluster_types.count(RingcommCluster) == 1
    assert not RingcommCluster.is_env_present()
    for name, value in (("SIZE", "2"), ("RENDEZVOUS", "127.0.0.1:1"), ("KEY", "5a" * 32)):
        monkeypatch.setenv(f"RINGCOMM_{name}", value)
    assert RingcommCluster.is_env_present()
    monkeypatch.setenv("RINGCOMM_SIZE", "two")
    assert not RingcommCluster.is_env_present(), "joining the job says what is wrong"


def test_the_failure_of_a_program_is_logged_when_its_rank_leaves(
    alone: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import ringcomm.jax as hvd
    from ringcomm.jax import programs

    lost = PeerLostError("rank 1 (there) was lost", rank=1)

    def fails() -> None:
        raise RuntimeError(f"INTERNAL: {lost}")

    monkeypatch.setattr(programs, "wait_for_programs", fails)
    record_cause(lost)
    with caplog.at_level(logging.WARNING, "ringcomm.jax"):
        programs._finish()
    assert caplog.records[-1].getMessage() == f"A collective of a JAX program failed: {lost}"
    with pytest.raises(PeerLostError) as raised, hvd.typed_errors():
        pass
    assert raised.value is lost
    with pytest.raises(PeerLostError):
        programs._programs_first()


def test_a_program_for_other_ranks_is_refused(alone: Any) -> None:
    from ringcomm.jax.programs import HostCall, SetPosition

    call = HostCall(Operation("allgather", Reduction()), SetPosition(1, 2), this_site())
    with pytest.raises(MismatchError, match=r"rank 1 of 2, .* Call jax.clear_caches\(\)") as raised:
        call.run([np.ones(2)])
    assert cause_of(RuntimeError(f"XLA: {raised.value}")) is raised.value


def test_trees_without_arrays_and_gradients_of_balanced_data(alone: Any) -> None:
    from ringcomm._adapter.graph_callbacks import CompressionState
    from ringcomm.balance.batches import Balanced
    from ringcomm.jax.training import GradientReducer

    data = Balanced(8, global_batch=4)
    reducer = GradientReducer(Reduction(weight=data.pace.cursor()), CompressionState())
    assert reducer({"a": None, "b": []}) == {"a": None, "b": []}
    assert data.pace.step == 0
    large = [jnp.ones(3_000_000), jnp.full(2, 2.0), jnp.arange(3.0)]
    for _ in data:
        found = reducer(large)
        assert [float(item[-1]) for item in found] == [1.0, 2.0, 2.0]
    assert data.pace.step == 2, "one reduction is one step, however large the gradients are"
