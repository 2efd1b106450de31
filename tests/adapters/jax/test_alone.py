"""ringcomm.jax in one process: its view of the job, the end of the job, programs, and gradients."""

from __future__ import annotations

import logging
import socket
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402 - these need jax

from ringcomm._adapter.graph_callbacks import CompressionState  # noqa: E402
from ringcomm._adapter.reduction import Reduction  # noqa: E402
from ringcomm._adapter.submit import record_cause  # noqa: E402
from ringcomm.calls.process_set import global_process_set as every_rank  # noqa: E402
from ringcomm.errors import ConfigError, NotOfferedError, PeerLostError  # noqa: E402
from ringcomm.ops import ReduceOp  # noqa: E402
from tests.adapters.signatures import differences_of_options  # noqa: E402


def test_every_function_takes_the_options_of_the_table() -> None:
    import ringcomm.jax as hvd

    assert differences_of_options(hvd, "ringcomm.jax") == []


# ---- the job as JAX sees it ------------------------------------------------------------------


def test_a_process_alone_is_no_cluster(alone: Any) -> None:
    from ringcomm.jax.cluster import RingcommCluster

    assert not RingcommCluster.is_env_present()
    host, _, port = RingcommCluster.get_coordinator_address().rpartition(":")
    assert host == socket.gethostname() and 0 < int(port) < 65536
    assert (RingcommCluster.get_process_count(), RingcommCluster.get_process_id()) == (1, 0)
    assert RingcommCluster.get_local_process_id() is None, "JAX would restrict the rank to one device"


def test_a_cluster_is_found_in_the_environment_before_the_job_is_joined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from jax._src.clusters import ClusterEnv

    from ringcomm.jax.cluster import RingcommCluster

    assert ClusterEnv._cluster_types[0] is RingcommCluster, "Slurm's variables would be read first"
    assert ClusterEnv._cluster_types.count(RingcommCluster) == 1
    assert not RingcommCluster.is_env_present()
    for name, value in (("SIZE", "2"), ("RENDEZVOUS", "127.0.0.1:1"), ("KEY", "5a" * 32)):
        monkeypatch.setenv(f"RINGCOMM_{name}", value)
    assert RingcommCluster.is_env_present()
    monkeypatch.setenv("RINGCOMM_SIZE", "two")
    assert not RingcommCluster.is_env_present(), "joining the job says what is wrong"


# ---- leaving the job -------------------------------------------------------------------------


def test_the_failure_of_a_program_is_logged_when_its_rank_leaves(
    alone: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from ringcomm.jax import ending, started

    lost = PeerLostError("rank 1 (there) was lost", rank=1)

    text = f"INTERNAL: {lost}"

    def fails() -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(started, "wait", fails)
    record_cause(lost)
    with caplog.at_level(logging.WARNING, "ringcomm.jax"):
        ending._finish()
        text = "of another kind"
        ending._finish()
    texts = [record.getMessage() for record in caplog.records]
    assert texts == [f"A collective of a JAX program failed: {cause}" for cause in (lost, "of another kind")]
    text = f"INTERNAL: {lost}"
    for first in (ending._programs_first, use_typed_errors):
        with pytest.raises(PeerLostError) as raised:
            first()
        assert raised.value is lost


def use_typed_errors() -> None:
    import ringcomm.jax as hvd

    with hvd.typed_errors():
        pass


def test_the_last_program_of_this_thread_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from ringcomm.jax import started

    waited = []
    monkeypatch.setattr(jax, "block_until_ready", waited.append)
    monkeypatch.setattr(started.latest, "done", "a result")
    started.wait()
    started.wait()
    assert waited == ["a result"] and started.latest.done is None


# ---- programs --------------------------------------------------------------------------------


def test_programs_run_as_those_of_jax(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import ringcomm.jax as hvd
    from ringcomm.jax import programs

    def function(x: Any, factor: float = 1.0) -> Any:
        return {"sum": hvd.psum(x) * factor, "none": None}

    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    static, placed = hvd.jit(static_argnames="factor")(function), hvd.jit(function, out_shardings=device)
    for made in (hvd.jit(function), static, placed):
        assert made.__name__ == "function"
        found = made(jnp.arange(3.0), factor=2.0)
        assert found["none"] is None and found["sum"].tolist() == [0.0, 2.0, 4.0]
        inside = jax.jit(lambda x, made=made: made(x)["sum"])(jnp.ones(2))
        assert inside.tolist() == [1.0, 1.0]
    with jax.disable_jit():
        assert hvd.jit(function)(jnp.ones(2))["sum"].tolist() == [1.0, 1.0]
    monkeypatch.setattr(programs, "trace_state_clean", None)
    plain = hvd.jit(function)
    assert hasattr(plain, "lower"), "where JAX has moved that name, it is jax.jit"
    assert plain(jnp.ones(2))["sum"].tolist() == [1.0, 1.0]


def test_programs_with_other_effects_stay_visible_to_jax(alone: Any) -> None:
    import ringcomm.jax as hvd

    seen = []

    @hvd.jit
    def shown(x: Any) -> Any:
        jax.debug.callback(lambda value: seen.append(float(value)), x)
        return hvd.psum(x)

    assert float(shown(jnp.float32(3))) == 3.0
    jax.effects_barrier()
    assert seen == [3.0]


def test_splits_are_for_calls_outside_of_programs(alone: Any) -> None:
    import ringcomm.jax as hvd

    rows, counts = hvd.alltoall(jnp.arange(3.0), [3])
    assert rows.tolist() == [0.0, 1.0, 2.0] and counts.tolist() == [3]
    with pytest.raises(NotOfferedError, match="alltoall with splits inside jit or grad"):
        jax.jit(lambda x: hvd.alltoall(x, [3])[0])(jnp.arange(3.0))


# ---- gradients -------------------------------------------------------------------------------


def test_gradients_of_one_rank(alone: Any) -> None:
    import ringcomm.jax as hvd

    def loss(w: Any, x: Any) -> Any:
        return (w * x).sum()

    x = jnp.arange(3.0)
    value, found = hvd.value_and_grad(loss)(jnp.ones(3), x)
    assert float(value) == 3.0 and found.tolist() == [0.0, 1.0, 2.0]
    assert hvd.grad(loss, op=hvd.Sum)(jnp.ones(3), x).tolist() == [0.0, 1.0, 2.0]
    found, more = hvd.grad(lambda w, x: (loss(w, x), x + 1), has_aux=True)(jnp.ones(3), x)
    assert found.tolist() == [0.0, 1.0, 2.0] and more.tolist() == [1.0, 2.0, 3.0]
    weighted = hvd.value_and_grad(loss, weight=lambda w, x: x.size)
    assert weighted(jnp.ones(3), x)[1].tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(ConfigError, match="gradient_predivide_factor"):
        hvd.grad(loss, op=hvd.Sum, gradient_predivide_factor=2.0)


def test_trees_without_arrays_and_gradients_of_balanced_data(alone: Any) -> None:
    from ringcomm.balance.batches import Balanced
    from ringcomm.jax.gradients import GradientReducer

    data = Balanced(8, global_batch=4)
    how = Reduction(ReduceOp.AVERAGE, 1.0, 1.0, every_rank, data.pace.cursor())
    reducer = GradientReducer(how._replace(compression="none"), CompressionState())
    assert reducer({"a": None, "b": []}) == {"a": None, "b": []}
    assert data.pace.step == 0
    large = [jnp.ones(3_000_000), jnp.full(2, 2.0), jnp.arange(3.0)]
    for _ in data:
        found = reducer(large)
        assert [float(item[-1]) for item in found] == [1.0, 2.0, 2.0]
    assert data.pace.step == 2, "one reduction is one step, however large the gradients are"


def test_codes_are_executed_by_the_reduction(alone: Any) -> None:
    from ringcomm.jax.gradients import gradient_reducer

    own = jnp.asarray(np.random.default_rng(1).standard_normal((64, 96)), jnp.float32)
    reducer = gradient_reducer(ReduceOp.AVERAGE, "int8", 1.0, every_rank, share=0.5)
    (found,) = reducer([own])
    assert float(jnp.abs(found - own / 2).max()) < 0.05


def test_a_version_of_jax_that_is_too_old_is_named() -> None:
    from ringcomm.jax import requirement

    for version in ("0.5.3", "0.6.0", "0.4.38.dev20250101"):
        with pytest.raises(ImportError, match=f"requires JAX 0.6.1 or newer, and JAX {version} is installed"):
            requirement.check(version)
    for version in ("0.6.1", "0.10.2", "1.0", jax.__version__):
        requirement.check(version)
