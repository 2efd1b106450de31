"""The program that prepares data: ``ringrun -np 4 python -m ringcomm.tensorflow.data.compute_worker FILE``.

It writes to FILE how training finds it, and removes the file when training is over, or gone.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import secrets
from pathlib import Path
from typing import Optional, Sequence

from ..._adapter.common import init, rank, size
from ..._adapter.objects import broadcast_object
from ...config import Membership
from ...data_service.service import ComputeService
from ...errors import ConfigError
from ..collectives import barrier
from .compute_service import SIDES, TfDataServiceConfig, compute_worker_fn


def main(dispatchers: int, dispatcher_side: str, configfile: str, timeout: int) -> None:
    """Run one rank of a compute job until training is over.

    Args:
        dispatchers: 1, or as many as there will be training ranks. It must divide the number of ranks.
        dispatcher_side: which job runs them, ``"compute"`` or ``"training"``.
        configfile: where rank 0 writes the configuration.
        timeout: seconds that everybody waits for everybody else to be set up, and this job for another
            training process when all that there were are gone.

    Raises:
        ConfigError: the arguments make no sense.
    """
    init()
    if dispatchers < 1 or size() % dispatchers:
        raise ConfigError(
            f"Every dispatcher gets as many workers: {size()} processes cannot be shared by {dispatchers}."
        )
    workers = size() // dispatchers
    service: Optional[ComputeService] = None
    written = False
    # The key itself does not travel: all ranks make it of the job's.
    salt = broadcast_object(secrets.token_bytes(32), name="TfDataServiceConfig.salt")
    key = hmac.new(Membership.from_environment().key, b"tf.data service\0" + salt, hashlib.sha256).digest()
    try:
        addresses = None
        if rank() == 0:
            service = ComputeService(dispatchers, workers, key, patience_s=timeout)
            addresses = service.addresses()
        addresses = broadcast_object(addresses, name="TfDataServiceConfig.addresses")
        config = TfDataServiceConfig(dispatchers, workers, dispatcher_side, addresses, key, timeout)
        if service is not None:
            config.write(configfile)
            written = True
        compute_worker_fn(config)
        barrier()  # nobody still has to be told that training is over
    finally:
        if service is not None:
            service.shutdown()
        if written:
            Path(configfile).unlink(missing_ok=True)


def parse(arguments: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m ringcomm.tensorflow.data.compute_worker",
        description="Prepare data for training ranks. Start it with ringrun.",
    )
    parser.add_argument("configfile", help="where to write what training needs to know")
    parser.add_argument(
        "--dispatchers", type=int, default=1, help="1, or as many as there are training ranks [1]"
    )
    parser.add_argument(
        "--dispatcher-side", choices=SIDES, default="compute", help="which job runs the dispatchers [compute]"
    )
    parser.add_argument(
        "--timeout", type=int, default=60,
        help="seconds that all wait for each other to be set up, and this job for another training process "
        "when all are gone [60]",
    )  # fmt: skip
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = parse()
    main(options.dispatchers, options.dispatcher_side, options.configfile, options.timeout)
