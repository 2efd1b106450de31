"""TensorFlow's data service: a compute job runs the input pipeline of a training job."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any, Dict

import pytest

from ringcomm.clock import Deadline
from ringcomm.config import Settings
from ringcomm.errors import ConfigError, NotOfferedError, RefusedError, StartTimeoutError
from tests.adapters.jobs import run_on
from tests.proc.test_ringrun_support import Launched

TRAINING = """
import dataclasses, json, os, stat, sys
import tensorflow as tf
import horovod.tensorflow as hvd
from horovod.runner.common.util import env
from horovod.tensorflow.data.compute_service import TfDataServiceConfig
from ringcomm import AuthenticationError

folder = sys.argv[1]
rank, size = env.get_env_rank_and_size()
config = TfDataServiceConfig.read(folder + "/compute.json", wait_for_file_creation=True, timeout=60)
found = {"mode": stat.S_IMODE(os.stat(folder + "/compute.json").st_mode)}

def read(dataset):
    return sorted(int(element) for batch in dataset.as_numpy_iterator() for element in batch)

def prepared(rank, size, dataset=tf.data.Dataset.range(40).batch(4), **options):
    return dataset.send_to_data_service(config, rank, size, **options)

hvd.init()
found["each"] = read(prepared(rank, size))
found["every worker"] = read(prepared(rank, size, processing_mode="parallel_epochs"))
found["shared"] = read(prepared(rank, size, reuse_dataset=True))
found["shared again"] = read(prepared(rank, size, reuse_dataset=True))
endless = tf.data.Dataset.range(40).repeat().batch(4)
taken = prepared(rank, size, endless, reuse_dataset=True, round_robin=True).take(6)
found["in turn"] = sum(1 for _ in taken)
try:
    dataclasses.replace(config, key=bytes(32)).compute_client().shutdown()
except AuthenticationError as problem:
    found["another key"] = str(problem)
with open(f"{folder}/rank{rank}.json", "w") as file:
    json.dump(found, file)
hvd.allgather_object(None)
if rank == 0:
    config.compute_client(verbose=2).shutdown()
"""
QUIET = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}


@pytest.mark.timeout(180)
def test_two_jobs_with_horovods_names(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    program = [sys.executable, "-m", "horovod.tensorflow.data.compute_worker", "compute.json"]
    compute = Launched("--horovod", "-np", "2", *program, cwd=tmp_path, env=QUIET)
    training = Launched("--horovod", "-np", "2", "train.py", str(tmp_path), cwd=tmp_path, env=QUIET)
    try:
        assert training.finish(120) == 0, training.err + compute.err
        assert compute.finish(30) == 0, compute.err  # training has ended it
    finally:
        compute.end()
        training.end()
    assert not (tmp_path / "compute.json").exists()
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    elements = list(range(40))
    for found in ranks:
        assert found["mode"] == 0o600
        assert found["each"] == elements
        assert found["every worker"] == sorted(2 * elements)
        assert found["in turn"] == 6
        assert "does not hold this job's key" in found["another key"]
    for name in ("shared", "shared again"):
        assert sorted(ranks[0][name] + ranks[1][name]) == elements


CRASHING = """
import sys
import tensorflow as tf
import ringcomm.tensorflow as hvd
from ringcomm.tensorflow.data.compute_service import TfDataServiceConfig, tf_data_service

hvd.init()
config = TfDataServiceConfig.read("compute.json", wait_for_file_creation=True, timeout=60)
with tf_data_service(config, hvd.rank()) as address:
    service = tf.data.experimental.service.distribute("parallel_epochs", address)
    for number in tf.data.Dataset.range(40).repeat().apply(service):
        if number > 10 and hvd.rank() == 1:
            raise ValueError("bad sample")
"""


@pytest.mark.timeout(330)
@pytest.mark.parametrize("side", ["compute", "training"])
def test_the_loss_of_a_training_job_ends_the_compute_job(tmp_path: Path, side: str) -> None:
    (tmp_path / "train.py").write_text(CRASHING)
    program = [sys.executable, "-m", "ringcomm.tensorflow.data.compute_worker", "compute.json"]
    options = ["--dispatcher-side", side, "--timeout", "30"]
    compute = Launched("-np", "2", *program, *options, cwd=tmp_path, env=QUIET)
    training = Launched("-np", "2", "train.py", cwd=tmp_path, env=QUIET)
    try:
        # 1, or 255 if TensorFlow takes so long to leave that the launcher ends the rank.
        assert training.finish(100) in (1, 255), training.err + compute.err
        assert "ValueError: bad sample" in training.err
        assert compute.finish(150) == 0, compute.err
    finally:
        compute.end()
        training.end()
    reports = [line for line in compute.err.splitlines() if "The job that trained is gone" in line]
    assert len(reports) == 1 and "30 s ago" in reports[0], compute.err
    assert not (tmp_path / "compute.json").exists()


WITHOUT_DISPATCHER = """
import threading, time
import tensorflow as tf
from ringcomm.tensorflow.data.compute_service import TfDataServiceConfig, tf_data_service

config = TfDataServiceConfig.read("compute.json", wait_for_file_creation=True, timeout=60)
taken = [0]

def pull(dataset):
    try:
        for _ in dataset:
            taken[0] += 1
    except tf.errors.OpError as problem:  # sooner or later: the dispatcher does not come back
        print(problem)
        taken[0] = max(taken[0], 30)

with tf_data_service(config, 0) as address:
    service = tf.data.experimental.service.distribute("distributed_epoch", address)
    dataset = tf.data.Dataset.range(10).repeat().apply(service)
    threading.Thread(target=pull, args=(dataset,), daemon=True).start()
    while taken[0] < 30:
        time.sleep(0.01)
before = -1
while taken[0] > before:  # until every worker waits for a split from the dispatcher, which has ended
    before = taken[0]
    time.sleep(1.0)
config.compute_client().shutdown()
"""


@pytest.mark.timeout(180)
def test_workers_end_that_wait_for_a_dispatcher_that_has_ended(tmp_path: Path) -> None:
    """TensorFlow holds the interpreter lock meanwhile: the other rank took that for a rank that is dead."""
    (tmp_path / "train.py").write_text(WITHOUT_DISPATCHER)
    program = [sys.executable, "-m", "ringcomm.tensorflow.data.compute_worker", "compute.json"]
    options = ["--dispatcher-side", "training", "--timeout", "60"]
    compute = Launched("-np", "2", "--dead-after", "9", *program, *options, cwd=tmp_path, env=QUIET)
    training = Launched("-np", "1", "train.py", cwd=tmp_path, env=QUIET)
    try:
        compute_ended = compute.finish(120)
        assert compute_ended == 0, compute.err + training.err
    finally:
        compute.end()
        training.end()


def test_a_worker_waits_for_its_dispatcher_for_less_than_the_failure_detector() -> None:
    from ringcomm.tensorflow.data.servers import dispatcher_timeout_s

    for timeout_s, dead_after_s, limit_s in ((60.0, 30.0, 10.0), (5.0, 30.0, 5.0), (60.0, 0.0, 60.0)):
        assert dispatcher_timeout_s(timeout_s, Settings(dead_after_s=dead_after_s)) == limit_s


@pytest.mark.timeout(180)
def test_dispatchers_of_every_kind() -> None:
    run_on(2, ["tests.adapters.tensorflow.checks_data_service"])


def config(**changes: Any) -> Any:
    from ringcomm.tensorflow.data.compute_service import TfDataServiceConfig

    whole: Dict[str, Any] = {
        "dispatchers": 2, "workers_per_dispatcher": 3, "dispatcher_side": "compute",
        "addresses": {"lo": [("127.0.0.1", 1)]}, "key": bytes(32), "timeout": 7,
    }  # fmt: skip
    return TfDataServiceConfig(**{**whole, **changes})


def test_the_configuration_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "compute.json"
    path.write_text("an older one")
    path.chmod(0o644)
    before = config(machine="a machine")
    before.write(str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert type(before).read(str(path)) == before == type(before).from_dict(before.to_dict())
    assert "key" not in repr(before)
    older = {name: value for name, value in before.to_dict().items() if name != "machine"}
    assert type(before).from_dict(older) == dataclasses.replace(before, machine="")
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(OSError, match="No such file"):
        before.write(str(tmp_path / "nowhere" / "compute.json"))


def test_invalid_configuration_files_are_refused(tmp_path: Path) -> None:
    for text, complaint in (
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "is not a data service configuration"),
        ('{"key": "", "timeout": 1}', "has no dispatchers, workers_per_dispatcher, dispatcher_side"),
    ):
        (tmp_path / "compute.json").write_text(text)
        (tmp_path / "compute.json").chmod(0o600)
        with pytest.raises(ConfigError, match=complaint):
            config().read(str(tmp_path / "compute.json"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_configuration_that_another_user_made_or_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "compute.json"
    config().write(str(path))
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="its mode is 0640.*chmod 600"):
        config().read(str(path))
    path.chmod(0o600)
    os.chown(path, 12345, 12345)
    with pytest.raises(PermissionError, match="another user"):
        config().read(str(path))
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(OSError, match="not a regular file"):
        config().read(str(path))


def test_invalid_values_are_refused() -> None:
    for changes in ({"dispatcher_side": "elsewhere"}, {"dispatchers": 0}, {"timeout": -1}):
        with pytest.raises(ConfigError, match=next(iter(changes))):
            dataclasses.replace(config(), **changes)
    for changes in ({"key": "no hex digits"}, {"addresses": {"lo": [1]}}, {"dispatchers": None}):
        with pytest.raises(ConfigError, match="not a data service configuration"):
            config().from_dict({**config().to_dict(), **changes})


def test_waiting_for_the_file_ends(tmp_path: Path) -> None:
    with pytest.raises(StartTimeoutError, match=r"compute.json was not written within 0.3 s"):
        config().read(str(tmp_path / "compute.json"), wait_for_file_creation=True, timeout=0.3)
    with pytest.raises(FileNotFoundError):
        config().read(str(tmp_path / "compute.json"))


def test_waiting_for_the_file_is_logged_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from ringcomm.tensorflow.data import compute_service

    def soon(limit_s: Any) -> Deadline:
        return Deadline(0.0 if limit_s == 10.0 else limit_s)

    monkeypatch.setattr(compute_service, "Deadline", soon)
    with caplog.at_level("WARNING", "ringcomm.tensorflow"), pytest.raises(StartTimeoutError):
        config().read(str(tmp_path / "compute.json"), wait_for_file_creation=True, timeout=0.3)
    texts = {record.getMessage() for record in caplog.records}
    assert texts == {f"still waiting for the compute job to write {tmp_path / 'compute.json'}"}


def test_a_configuration_that_cannot_be_written_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        config(machine=object()).write(str(tmp_path / "compute.json"))
    assert list(tmp_path.iterdir()) == []


def test_dispatchers_divide_the_ranks(alone: Any, tmp_path: Path) -> None:
    from ringcomm.tensorflow.data.compute_worker import main, parse

    path = str(tmp_path / "compute.json")
    for dispatchers in (0, 2):
        text = f"--dispatchers {dispatchers} does not divide the 1 ranks of this job"
        with pytest.raises(ConfigError, match=text):
            main(dispatchers, "compute", path, 5)
    with pytest.raises(ConfigError, match="timeout must be larger than 0"):
        main(1, "compute", path, 0)
    assert list(tmp_path.iterdir()) == []
    found = parse([path, "--dispatcher-side", "training", "--timeout", "5"])
    assert vars(found) == {
        "configfile": path, "dispatchers": 1, "dispatcher_side": "training", "timeout": 5
    }  # fmt: skip


def test_a_dispatcher_that_is_refused_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    from ringcomm.data_service.service import ComputeService
    from ringcomm.tensorflow.data import servers
    from ringcomm.tensorflow.data.compute_service import tf_data_service

    stopped = []
    stop = servers.stop
    monkeypatch.setattr(servers, "stop", lambda server: stopped.append(server) or stop(server))
    monkeypatch.setenv("RINGCOMM_IFACE", "lo")
    key = bytes(range(32))
    service = ComputeService(1, 1, key)
    on_this_side = config(
        dispatchers=1, workers_per_dispatcher=1, addresses=service.addresses(), key=key, timeout=60,
        dispatcher_side="training",
    )  # fmt: skip
    try:
        on_this_side.compute_client().register_dispatcher(0, "grpc://elsewhere:1")
        refused = pytest.raises(RefusedError, match="registered already, at grpc://elsewhere:1")
        with refused, tf_data_service(on_this_side, 0):
            pass
    finally:
        service.shutdown()
    assert [server is not None for server in stopped] == [True, False]


def test_a_service_that_is_incomplete_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorflow as tf

    from ringcomm.data_service.service import ComputeService
    from ringcomm.tensorflow.data.compute_service import send_to_data_service, tf_data_service

    monkeypatch.setenv("RINGCOMM_IFACE", "lo")
    service = ComputeService(1, 2, bytes(32))
    here = {"dispatchers": 1, "workers_per_dispatcher": 2, "addresses": service.addresses(), "timeout": 0.5}
    dataset = tf.data.Dataset.range(1)
    try:
        with pytest.raises(StartTimeoutError, match="dispatcher 0 has not been registered by rank 0 of the"):
            send_to_data_service(dataset, config(**here), rank=1)
        on_this_side = config(**here, dispatcher_side="training")
        missing = pytest.raises(StartTimeoutError, match="rank 0, rank 1 of the compute job")
        with missing, tf_data_service(on_this_side, 0):
            pass
        with pytest.raises(NotOfferedError, match="with tf_data_service"):
            dataset.send_to_data_service(on_this_side, 0)
        monkeypatch.setenv("RINGCOMM_ENCRYPT", "1")
        with pytest.raises(ConfigError, match="TensorFlow's data service does not support"):
            send_to_data_service(dataset, config(**here), 0)
    finally:
        service.shutdown()
