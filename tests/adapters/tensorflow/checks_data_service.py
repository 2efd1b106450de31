"""Checks of the data service, in which the ranks that train also prepare the data, in a thread each."""

from __future__ import annotations

import stat
import tempfile
from pathlib import Path
from threading import Thread
from typing import Any, List

import tensorflow as tf

import ringcomm as rc
import ringcomm.tensorflow as hvd
from ringcomm.tensorflow.data.compute_service import TfDataServiceConfig, tf_data_service
from ringcomm.tensorflow.data.compute_worker import main

ELEMENTS = list(range(40))


def _read(dataset: Any) -> List[int]:
    return sorted(int(element) for batch in dataset.as_numpy_iterator() for element in batch)


def _with_workers(dispatchers: int, side: str, consume: Any) -> None:
    """Run a compute job in threads; ``consume`` gets its configuration and gives what this rank has read."""
    folder = hvd.broadcast_object(tempfile.mkdtemp() if rc.rank() == 0 else None, name="folder")
    path = f"{folder}/compute.json"
    worker = Thread(target=main, args=(dispatchers, side, path, 30), daemon=True)
    worker.start()
    config = TfDataServiceConfig.read(path, wait_for_file_creation=True, timeout=30)
    assert (config.dispatchers, config.workers_per_dispatcher) == (dispatchers, rc.size() // dispatchers)
    assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
    consume(config)
    hvd.allgather_object(None, name="read by all")
    if rc.rank() == 0:
        config.compute_client(verbose=2).shutdown()
    worker.join(30)
    assert not worker.is_alive()
    hvd.allgather_object(None, name="ended by all")
    assert not Path(path).exists()
    if rc.rank() == 0:
        Path(folder).rmdir()


def _on_the_training_side(config: TfDataServiceConfig, share: bool) -> List[int]:
    with tf_data_service(config, rc.rank()) as address:
        service = tf.data.experimental.service.distribute(
            "distributed_epoch", address, job_name="shared" if share else None
        )
        found = _read(tf.data.Dataset.range(40).batch(4).apply(service))
        hvd.allgather_object(None, name="all ranks have read")
    return found


def check_one_dispatcher_on_the_training_side_shares_elements_out() -> None:
    def consume(config: TfDataServiceConfig) -> None:
        parts = hvd.allgather_object(_on_the_training_side(config, share=True))
        assert sorted(sum(parts, [])) == ELEMENTS

    _with_workers(1, "training", consume)


def check_every_rank_has_its_own_dispatcher_on_the_training_side() -> None:
    def consume(config: TfDataServiceConfig) -> None:
        assert _on_the_training_side(config, share=False) == ELEMENTS

    _with_workers(2, "training", consume)


def check_every_rank_has_its_own_dispatcher_on_the_compute_side() -> None:
    def consume(config: TfDataServiceConfig) -> None:
        dataset = tf.data.Dataset.range(40).batch(4).send_to_data_service(config, rc.rank())
        assert _read(dataset) == ELEMENTS

    _with_workers(2, "compute", consume)
