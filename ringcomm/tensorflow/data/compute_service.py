"""TensorFlow's data service, run by the ranks of one job (the compute job) for those of a training job.

::

    ringrun -np 4 python -m ringcomm.tensorflow.data.compute_worker compute.json  # the compute job
    ringrun -np 2 train.py compute.json                                           # the training job

    compute_config = TfDataServiceConfig.read("compute.json", wait_for_file_creation=True)
    dataset = dataset.map(...).batch(32).send_to_data_service(compute_config, hvd.rank(), hvd.size())
    ...
    if hvd.rank() == 0:
        compute_config.compute_client().shutdown()  # training is over: the compute job ends

The transformations before ``send_to_data_service`` run in the compute job, those after it in the training
job. In TensorFlow's words, a worker produces a dataset's elements, and a dispatcher divides the dataset among
its workers; there is one dispatcher for all training ranks, or one for each. A registry in rank 0 of the
compute job assigns workers to dispatchers; its connections are authenticated, like all of ringcomm's.
TensorFlow's own connections are not: its dispatchers and workers listen on all addresses of their hosts, and
every process that can connect to them can make them execute a dataset. Use them in trusted networks only.
"""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import logging
import shlex
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, Mapping, Optional, Sequence, Tuple

import tensorflow as tf

from ..._adapter.basics import barrier
from ..._adapter.common import init, rank, shutdown
from ...clock import Deadline
from ...config import Membership, Settings
from ...configuration.endpoints import format_endpoint
from ...data_service.service import ComputeClient
from ...errors import ConfigError, NotOfferedError, StartTimeoutError
from ...storage.files import Exposed, read_private, write_private
from . import servers

__all__ = ["TfDataServiceConfig", "compute_worker_fn", "send_to_data_service", "tf_data_service"]

logger = logging.getLogger("ringcomm.tensorflow")

SIDES = ("compute", "training")
_POLL_INTERVAL_S = 0.2
_LIMIT_BYTES = 1 << 20
_shared_jobs = itertools.count()


@dataclasses.dataclass(frozen=True)
class TfDataServiceConfig:
    """The layout of a compute job and the addresses of its registry.

    Attributes:
        dispatchers: number of dispatchers: 1, or the number of training ranks.
        workers_per_dispatcher: number of ranks of the compute job that work for each dispatcher.
        dispatcher_side: the job that runs the dispatchers, ``"compute"`` or ``"training"``.
        addresses: addresses and ports of the registry, by network interface.
        key: secret by which both jobs authenticate to the registry. Every process that has it can take part.
        timeout: seconds that dispatchers, workers and training ranks wait for each other to start, and that
            the compute job waits for another training process after the last one has disconnected.
        machine: identifies the machine on which the registry runs; "": not known. On another machine, no
            address is dialled that that machine has itself: docker0's, for example, leads to no other one.

    Raises:
        ConfigError: a number is not positive, or ``dispatcher_side`` is none of the two.
    """

    dispatchers: int
    workers_per_dispatcher: int
    dispatcher_side: str
    addresses: Mapping[str, Sequence[Tuple[str, int]]]
    key: bytes = dataclasses.field(repr=False)
    timeout: int = 60
    machine: str = ""

    def __post_init__(self) -> None:
        if self.dispatcher_side not in SIDES:
            raise ConfigError(f"dispatcher_side must be one of {SIDES}, not {self.dispatcher_side!r}.")
        for name in ("dispatchers", "workers_per_dispatcher", "timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be larger than 0, not {getattr(self, name)!r}.")

    def compute_client(self, verbose: int = 1) -> ComputeClient:
        """Create a client of the registry; ``compute_client().shutdown()`` ends the compute job.

        Args:
            verbose: no effect on results; Horovod's level of log output.

        Returns:
            the client, which connects when it is first used.
        """
        return ComputeClient(self.addresses, self.key, verbose=verbose, compute_machine=self.machine)

    def to_dict(self) -> Dict[str, Any]:
        """The configuration as a dictionary that can be written as JSON; the key is hexadecimal."""
        return {**self.__dict__, "key": self.key.hex()}

    @staticmethod
    def from_dict(config: Mapping[str, Any]) -> TfDataServiceConfig:
        """Create a configuration from the result of :meth:`to_dict`.

        Args:
            config: all attributes by name; ``machine`` may be missing.

        Raises:
            ConfigError: an attribute is missing or has a wrong type.
        """
        names = [item.name for item in dataclasses.fields(TfDataServiceConfig)]
        missing = [name for name in names if name not in config and name != "machine"]
        if missing:
            raise ConfigError(f"This is not a data service configuration: it has no {', '.join(missing)}.")
        try:
            addresses = {
                str(name): [(str(address), int(port)) for address, port in pairs]
                for name, pairs in config["addresses"].items()
            }
            return TfDataServiceConfig(
                dispatchers=int(config["dispatchers"]),
                workers_per_dispatcher=int(config["workers_per_dispatcher"]),
                dispatcher_side=config["dispatcher_side"],
                addresses=addresses,
                key=bytes.fromhex(config["key"]),
                timeout=int(config["timeout"]),
                machine=str(config.get("machine", "")),
            )
        except (AttributeError, OverflowError, TypeError, ValueError) as problem:
            raise ConfigError(f"This is not a data service configuration: {problem}.") from None

    def write(self, filename: str) -> None:
        """Write the configuration to a JSON file that only its owner may read.

        The file is renamed into place: a reader never finds an incomplete one.

        Args:
            filename: path of the file.

        Raises:
            OSError: the file cannot be written.
        """
        write_private(filename, json.dumps(self.to_dict()).encode())

    @staticmethod
    def read(
        filename: str, wait_for_file_creation: bool = False, timeout: Optional[float] = None
    ) -> TfDataServiceConfig:
        """Read the configuration that a compute job has written.

        Args:
            filename: path of the file.
            wait_for_file_creation: wait until the file exists.
            timeout: seconds to wait for it; None: no limit, with a log line (WARNING) every 10 s.

        Returns:
            the configuration.

        Raises:
            ConfigError: the file is not a data service configuration, or other users can read it.
            StartTimeoutError: the file did not exist within ``timeout``.
            OSError: the file cannot be read, or belongs to another user.
        """
        path, deadline, remind = Path(filename), Deadline(timeout), Deadline(10.0)
        while wait_for_file_creation and not path.exists():
            if deadline.expired():
                raise StartTimeoutError(
                    f"{filename} was not written within {timeout:g} s. The compute job writes it once all of "
                    "its ranks have started. Check that the job is running with the same path and that both "
                    "hosts share the file system; otherwise copy the file."
                )
            if remind.expired():
                logger.warning("still waiting for the compute job to write %s", filename)
                remind.restart()
            time.sleep(_POLL_INTERVAL_S)
        try:
            found = json.loads(read_private(filename, _LIMIT_BYTES))
        except Exposed as problem:
            raise ConfigError(
                f"{filename} is refused: {problem.strerror}, so other users may have the key in it. Run "
                f"chmod 600 {shlex.quote(filename)}; if there are others, start the compute job again."
            ) from None
        except (ValueError, RecursionError) as problem:
            raise ConfigError(f"{filename} is not JSON: {problem}.") from None
        except OSError as problem:
            if problem.errno != errno.EFBIG:
                raise
            why = problem.strerror
            raise ConfigError(f"{filename} is not a data service configuration: {why}.") from None
        if not isinstance(found, dict):
            raise ConfigError(f"{filename} is not a data service configuration: it is not a JSON object.")
        return TfDataServiceConfig.from_dict(found)


@contextmanager
def tf_data_service(compute_config: TfDataServiceConfig, rank: int) -> Iterator[str]:
    """Context manager that waits until the dispatcher of a training rank and its workers are ready.

    The context value is the dispatcher's address, for ``tf.data.experimental.service.distribute``. If the
    training side runs the dispatchers, this rank's dispatcher ends with the ``with`` block. With one
    dispatcher for all ranks, rank 0 runs it, so the ranks must leave the block together.

    Args:
        compute_config: the configuration of the compute job.
        rank: this training rank.

    Yields:
        the dispatcher's address with its protocol.

    Raises:
        StartTimeoutError: the dispatcher or a worker was not ready in time; the message names it.
        RefusedError: there are more training ranks than dispatchers, or another training job uses them.
        AuthenticationError: the configuration is that of another compute job.
        ConfigError: the job has ``--encrypt``, which TensorFlow's data service does not support.
    """
    _refuse_encryption()
    compute = compute_config.compute_client(verbose=2)
    single = compute_config.dispatchers == 1
    number = 0 if single else rank
    server = None
    compute.stay(compute_config.timeout)
    try:
        if compute_config.dispatcher_side == "training" and number == rank:
            server = _start_dispatcher(compute, number, compute_config.timeout)
        address = compute.wait_for_dispatcher_registration(
            number, compute_config.timeout, _dispatcher_process(compute_config, number)
        )
        compute.wait_for_dispatcher_worker_registration(number, compute_config.timeout)
        yield address
    finally:
        servers.stop(server)


def send_to_data_service(
    dataset: Any,
    compute_config: TfDataServiceConfig,
    rank: int,
    size: Optional[int] = None,
    processing_mode: str = "distributed_epoch",
    reuse_dataset: bool = False,
    round_robin: bool = False,
) -> Any:
    """Run a dataset in the compute job. Also a method of ``tf.data.Dataset``.

    Args:
        dataset: the ``tf.data.Dataset`` that the workers of the compute job run.
        compute_config: the configuration of the compute job.
        rank: this rank of the training job.
        size: number of ranks of the training job; needed with ``round_robin``.
        processing_mode: ``"distributed_epoch"``: the workers of a dispatcher share the dataset's elements;
            ``"parallel_epochs"``: each worker iterates over all elements, in its own order.
        reuse_dataset: the training ranks of one dispatcher share the results, first come, first served: in
            a distributed epoch each element goes to exactly one of them. False: each rank gets an epoch of
            its own, and so every element. With True all ranks must send the same datasets in the same order.
        round_robin: with ``reuse_dataset``, results go to the ranks in rotation. The dataset must be
            infinite.

    Returns:
        a ``tf.data.Dataset`` of the elements that the compute job produces, with the same element spec.

    Raises:
        NotOfferedError: the training side runs the dispatchers: use :func:`tf_data_service`.
        StartTimeoutError: the dispatcher or a worker was not ready in time; the message names it.
        RefusedError: there are more training ranks than dispatchers, or another training job uses them.
        AuthenticationError: the configuration is that of another compute job.
        ConfigError: the job has ``--encrypt``, which TensorFlow's data service does not support.
    """
    if compute_config.dispatcher_side == "training":
        raise NotOfferedError(
            "The dispatchers run on the training side and must run until the data has been read: use "
            "`with tf_data_service(compute_config, rank) as address:` and "
            "tf.data.experimental.service.distribute()."
        )
    rotates = reuse_dataset and round_robin
    with tf_data_service(compute_config, rank) as address:
        return dataset.apply(
            tf.data.experimental.service.distribute(
                processing_mode=processing_mode,
                service=address,
                job_name=_shared_name() if reuse_dataset else None,
                consumer_index=rank if rotates else None,
                num_consumers=size if rotates else None,
            )
        )


def _shared_name() -> str:
    """The next name of a data service job that the training ranks share.

    TensorFlow refuses a second dataset under the same name, and the same dataset would be at its end.
    """
    number = next(_shared_jobs)
    return f"job-{number}" if number else "job"


tf.data.Dataset.send_to_data_service = send_to_data_service


def compute_worker_fn(compute_config: TfDataServiceConfig) -> None:
    """Run one rank of the compute job until it is shut down: a worker, and on some ranks a dispatcher.

    It returns when all workers of the job have stopped.

    Args:
        compute_config: the configuration of this compute job.

    Raises:
        StartTimeoutError: the worker's dispatcher was not ready in time.
        PeerLostError: the connection to the registry was lost.
        ConfigError: the job has ``--encrypt``, which TensorFlow's data service does not support.
    """
    serve(compute_config, leaves=False)


def serve(compute_config: TfDataServiceConfig, leaves: bool) -> None:
    """See :func:`compute_worker_fn`.

    Args:
        compute_config: the configuration of this compute job.
        leaves: leave the job, as by ``shutdown()``, before this rank's servers stop. TensorFlow keeps the
            interpreter lock for as long as that takes, which under load was longer than a rank may be silent.
    """
    _refuse_encryption()
    init()
    index = rank()
    number, place = divmod(index, compute_config.workers_per_dispatcher)
    compute = compute_config.compute_client(verbose=2)
    timeout = compute_config.timeout
    dispatcher, worker = None, None
    try:
        if compute_config.dispatcher_side == "compute" and place == 0:
            dispatcher = _start_dispatcher(compute, number, timeout)
        process = _dispatcher_process(compute_config, number)
        address = compute.wait_for_dispatcher_registration(number, timeout, process)
        worker = servers.start_worker(address, compute.own_address(timeout), timeout)
        compute.register_worker_for_dispatcher(number, index)
        logger.info("worker %d serves dispatcher %d at %s", index, number, address)
        reason = compute.wait_for_shutdown()
        if reason and index == 0:
            logger.warning("%s", reason)
        if leaves:
            barrier()  # every rank has been informed that training is over
            shutdown()
        else:
            servers.stop(worker)
            barrier()  # the dispatchers must run until all workers have stopped
    finally:
        servers.stop(worker)
        servers.stop(dispatcher)


def _start_dispatcher(compute: ComputeClient, number: int, timeout: int) -> Any:
    server = servers.start_dispatcher()
    try:
        # The target has the host localhost, which other hosts cannot connect to.
        protocol, _, local = server.target.partition("://")
        address = format_endpoint(compute.own_address(timeout), int(local.rpartition(":")[2]))
        compute.register_dispatcher(number, f"{protocol}://{address}")
    except BaseException:
        servers.stop(server)
        raise
    logger.info("dispatcher %d is at %s", number, address)
    return server


def _dispatcher_process(config: TfDataServiceConfig, number: int) -> str:
    """The process that runs a dispatcher, for messages."""
    if config.dispatcher_side == "training":
        return f"training rank {number}"
    return f"rank {number * config.workers_per_dispatcher} of the compute job"


def _refuse_encryption() -> None:
    if Settings.from_environment().encrypt or Membership.from_environment().certificate:
        raise ConfigError(
            "This job has --encrypt, and TensorFlow's data service does not support encryption: samples "
            "would be sent in plain text. Leave out --encrypt in a trusted network or over WireGuard, or "
            "prepare the data in the training ranks."
        )
