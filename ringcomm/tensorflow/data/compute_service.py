"""TensorFlow's data service, run by the ranks of one job (the compute job) for those of another that trains.

::

    ringrun -np 4 python -m ringcomm.tensorflow.data.compute_worker compute.json  # they prepare data
    ringrun -np 2 train.py compute.json                                           # and these train

    compute_config = TfDataServiceConfig.read("compute.json", wait_for_file_creation=True)
    dataset = dataset.map(...).batch(32).send_to_data_service(compute_config, hvd.rank(), hvd.size())
    ...
    if hvd.rank() == 0:
        compute_config.compute_client().shutdown()  # training is over: the compute job ends

What comes before ``send_to_data_service`` is done there, and what comes after it here. Who prepares data for
whom is settled in a registry that rank 0 of the compute job serves; it is authenticated, like all of
ringcomm. TensorFlow's own connections are not: its dispatchers and workers listen on all addresses of their
hosts, and whoever reaches them can have them run a dataset. Use them in networks that you trust.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, Mapping, Optional, Sequence, Tuple

import tensorflow as tf

from ..._adapter.common import init, rank
from ...clock import Deadline
from ...config import Membership, Settings
from ...data_service.service import ComputeClient
from ...endpoints import format_endpoint
from ...errors import ConfigError, NotOfferedError, StartTimeoutError

__all__ = ["TfDataServiceConfig", "compute_worker_fn", "send_to_data_service", "tf_data_service"]

logger = logging.getLogger("ringcomm.tensorflow")

SIDES = ("compute", "training")
_LOOK_EVERY_S = 0.2
_HEARTBEAT_MS = 1000
_shared = itertools.count()


@dataclasses.dataclass(frozen=True)
class TfDataServiceConfig:
    """How a compute job is laid out and where its registry is.

    Attributes:
        dispatchers: 1 for all training ranks, or else as many as there are training ranks.
        workers_per_dispatcher: how many ranks of the compute job work for each.
        dispatcher_side: which job runs the dispatchers, ``"compute"`` or ``"training"``.
        addresses: where the registry listens, by network interface.
        key: what everybody proves to the registry. Whoever knows it can take part.
        timeout: seconds that everybody waits for everybody else to be set up, and the compute job for another
            training process when all that there were are gone.

    Raises:
        ConfigError: the numbers or the side make no sense.
    """

    dispatchers: int
    workers_per_dispatcher: int
    dispatcher_side: str
    addresses: Mapping[str, Sequence[Tuple[str, int]]]
    key: bytes = dataclasses.field(repr=False)
    timeout: int = 60

    def __post_init__(self) -> None:
        if self.dispatcher_side not in SIDES:
            raise ConfigError(f"dispatcher_side must be one of {SIDES}, not {self.dispatcher_side!r}.")
        for name in ("dispatchers", "workers_per_dispatcher", "timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be larger than 0, not {getattr(self, name)!r}.")

    def compute_client(self, verbose: int = 1) -> ComputeClient:
        """What asks the registry; ``compute_client().shutdown()`` ends the compute job."""
        return ComputeClient(self.addresses, self.key, verbose=verbose)

    def to_dict(self) -> Dict[str, Any]:
        """Plain values, as they are written to a file."""
        return {**self.__dict__, "key": self.key.hex()}

    @staticmethod
    def from_dict(config: Mapping[str, Any]) -> TfDataServiceConfig:
        """The inverse of :meth:`to_dict`.

        Raises:
            ConfigError: something is missing or of another type.
        """
        names = [item.name for item in dataclasses.fields(TfDataServiceConfig)]
        missing = [name for name in names if name not in config]
        if missing:
            raise ConfigError(f"This is no configuration of a data service: it lacks {', '.join(missing)}.")
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
            )
        except (AttributeError, TypeError, ValueError) as problem:
            raise ConfigError(f"This is no configuration of a data service: {problem}.") from None

    def write(self, filename: str) -> None:
        """Write it to a file that only its owner may read; the file is there at once and complete.

        Raises:
            OSError: the file cannot be written.
        """
        path = Path(filename)
        # mkstemp's files may be read by nobody else, from the first moment.
        descriptor, partial = tempfile.mkstemp(dir=str(path.parent), prefix=path.name)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump(self.to_dict(), file)
            Path(partial).replace(path)
        except BaseException:
            Path(partial).unlink()
            raise

    @staticmethod
    def read(
        filename: str, wait_for_file_creation: bool = False, timeout: Optional[float] = None
    ) -> TfDataServiceConfig:
        """Read what a compute job has written.

        Args:
            wait_for_file_creation: whether to wait until it has.
            timeout: for how many seconds; None: without a limit, with a line in the log now and then.

        Raises:
            ConfigError: the file holds something else.
            StartTimeoutError: it has not been written in time.
            OSError: it cannot be read.
        """
        path, deadline, remind = Path(filename), Deadline(timeout), Deadline(10.0)
        while wait_for_file_creation and not path.exists():
            if deadline.expired():
                raise StartTimeoutError(
                    f"Nobody has written {filename} within {timeout:g} s. The compute job does, once all of "
                    "its ranks have started: is it running, with the same path, and is that on a file system "
                    "that this host shares? Otherwise copy the file."
                )
            if remind.expired():
                logger.warning("still waiting for the compute job to write %s", filename)
                remind.restart()
            time.sleep(_LOOK_EVERY_S)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as problem:
            raise ConfigError(f"{filename} is no JSON: {problem}.") from None
        if not isinstance(found, dict):
            raise ConfigError(f"{filename} holds no configuration of a data service: it is no JSON object.")
        return TfDataServiceConfig.from_dict(found)


@contextmanager
def tf_data_service(compute_config: TfDataServiceConfig, rank: int) -> Iterator[str]:
    """The dispatcher of a training rank, and all of its workers, ready to be used.

    Gives the dispatcher's address, for ``tf.data.experimental.service.distribute``. If the training side runs
    the dispatchers, this rank's ends with the ``with`` block; if there is one for all, it is rank 0's, so the
    ranks should leave the block together.

    Args:
        rank: this training rank.

    Raises:
        StartTimeoutError: dispatcher or workers are not there in time; the message says which.
        RefusedError: there are more training ranks than dispatchers, or they are somebody else's.
        AuthenticationError: the configuration is that of another compute job.
        ConfigError: the job encrypts, which TensorFlow's data service does not.
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
            number, compute_config.timeout, _maker(compute_config, number)
        )
        compute.wait_for_dispatcher_worker_registration(number, compute_config.timeout)
        yield address
    finally:
        if server is not None:
            _stop(server)


def send_to_data_service(
    dataset: Any,
    compute_config: TfDataServiceConfig,
    rank: int,
    size: Optional[int] = None,
    processing_mode: str = "distributed_epoch",
    reuse_dataset: bool = False,
    round_robin: bool = False,
) -> Any:
    """Have a dataset prepared by the compute job. Also a method of ``tf.data.Dataset``.

    Args:
        rank, size: of the training job. With ``reuse_dataset`` all ranks send the same datasets, in the same
            order.
        processing_mode: ``"distributed_epoch"``: a dispatcher's workers share the dataset's elements;
            ``"parallel_epochs"``: each of them goes through all elements, in an order of its own.
        reuse_dataset: whether the training ranks share what comes (of one dispatcher), first come, first
            served: with a distributed epoch every element then goes to one rank, otherwise to every rank.
        round_robin: with ``reuse_dataset``: the ranks are served in turn. The dataset must have no end.

    Returns:
        the dataset of what the compute job prepares.

    Raises:
        NotOfferedError: the training side runs the dispatchers: use :func:`tf_data_service`.
    """
    if compute_config.dispatcher_side == "training":
        raise NotOfferedError(
            "The dispatchers run on the training side here, and must stay until the data has been read: use "
            "`with tf_data_service(compute_config, rank) as address:` and tf.data's own distribute()."
        )
    in_turn = reuse_dataset and round_robin
    with tf_data_service(compute_config, rank) as address:
        return dataset.apply(
            tf.data.experimental.service.distribute(
                processing_mode=processing_mode,
                service=address,
                job_name=_shared_name() if reuse_dataset else None,
                consumer_index=rank if in_turn else None,
                num_consumers=size if in_turn else None,
            )
        )


def _shared_name() -> str:
    """The next name of a job of TensorFlow's that the training ranks share.

    If two datasets had the same, the second would be refused; a dataset sent again would be at its end.
    """
    number = next(_shared)
    return f"job-{number}" if number else "job"


tf.data.Dataset.send_to_data_service = send_to_data_service


def compute_worker_fn(compute_config: TfDataServiceConfig) -> None:
    """What every rank of the compute job does, from start to end: a worker, and for some a dispatcher.

    Raises:
        StartTimeoutError: the worker's dispatcher is not there in time.
        PeerLostError: the registry has gone.
        ConfigError: the job encrypts, which TensorFlow's data service does not.
    """
    _refuse_encryption()
    init()
    index = rank()
    number, place = divmod(index, compute_config.workers_per_dispatcher)
    compute = compute_config.compute_client(verbose=2)
    timeout = compute_config.timeout
    servers = []
    try:
        if compute_config.dispatcher_side == "compute" and place == 0:
            servers.append(_start_dispatcher(compute, number, timeout))
        address = compute.wait_for_dispatcher_registration(number, timeout, _maker(compute_config, number))
        servers.insert(0, _start_worker(address, compute.own_address(timeout), timeout))
        compute.register_worker_for_dispatcher(number, index)
        logger.info("worker %d serves dispatcher %d at %s", index, number, address)
        why = compute.wait_for_shutdown()
        if why and index == 0:
            logger.warning("%s", why)
    finally:
        for server in servers:
            _stop(server)


def _start_dispatcher(compute: ComputeClient, number: int, timeout: int) -> Any:
    server = tf.data.experimental.service.DispatchServer()
    try:
        # It names itself localhost, which is of no use on other hosts.
        protocol, _, local = server.target.partition("://")
        address = format_endpoint(compute.own_address(timeout), int(local.rpartition(":")[2]))
        compute.register_dispatcher(number, f"{protocol}://{address}")
    except BaseException:
        _stop(server)
        raise
    logger.info("dispatcher %d is at %s", number, address)
    return server


def _start_worker(dispatcher: str, host: str, timeout: int) -> Any:
    # TensorFlow puts the port in that the system has chosen.
    shown = f"[{host}]" if ":" in host else host
    config = tf.data.experimental.service.WorkerConfig(
        dispatcher_address=dispatcher.partition("://")[2],
        worker_address=f"{shown}:%port%",
        heartbeat_interval_ms=_HEARTBEAT_MS,
        dispatcher_timeout_ms=timeout * 1000,
    )
    return tf.data.experimental.service.WorkerServer(config)


def _stop(server: Any) -> None:
    server._stop()  # older versions of TensorFlow have no other name for it
    server.join()


def _maker(config: TfDataServiceConfig, number: int) -> str:
    """Who is to run a dispatcher."""
    if config.dispatcher_side == "training":
        return f"training rank {number}"
    return f"rank {number * config.workers_per_dispatcher} of the compute job"


def _refuse_encryption() -> None:
    if Settings.from_environment().encrypt or Membership.from_environment().certificate:
        raise ConfigError(
            "This job encrypts (--encrypt), and TensorFlow's data service cannot: samples would cross the "
            "network in plain text. Leave --encrypt out, in a network that you trust or over WireGuard; or "
            "prepare the data in the training ranks."
        )
