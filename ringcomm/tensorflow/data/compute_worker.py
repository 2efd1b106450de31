"""The compute job's program: ``ringrun -np 4 python -m ringcomm.tensorflow.data.compute_worker FILE``.

It writes its configuration to FILE, from which training ranks read its addresses, and removes the file when
training has ended or its processes are lost.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import secrets
from typing import Optional, Sequence

from ..._adapter.common import init, rank, size
from ..._adapter.objects import broadcast_object
from ...api import context
from ...config import Membership
from ...data_service.service import ComputeService
from ...errors import ConfigError
from ...storage.files import remove_file
from .compute_service import SIDES, TfDataServiceConfig, serve


def main(
    dispatchers: int, dispatcher_side: str, configfile: str, timeout: int, leaves: bool = False
) -> None:
    """Run one rank of a compute job until training ends.

    Args:
        dispatchers: number of dispatchers: 1, or the number of training ranks. It must divide the number of
            ranks of this job.
        dispatcher_side: the job that runs the dispatchers, ``"compute"`` or ``"training"``.
        configfile: path to which rank 0 writes the configuration.
        timeout: seconds that dispatchers, workers and training ranks wait for each other to start, and that
            this job waits for another training process after the last one has disconnected.
        leaves: leave the job before this rank's servers stop; see :func:`.compute_service.serve`.

    Raises:
        ConfigError: ``dispatchers`` does not divide the number of ranks, or an argument is invalid.
    """
    init()
    if dispatchers < 1 or size() % dispatchers:
        raise ConfigError(
            f"--dispatchers {dispatchers} does not divide the {size()} ranks of this job: every dispatcher "
            "needs the same number of workers."
        )
    workers = size() // dispatchers
    service: Optional[ComputeService] = None
    written = False
    # The key itself is not sent: all ranks derive it from the job's key.
    salt = broadcast_object(secrets.token_bytes(32), name="TfDataServiceConfig.salt")
    joined_as = context().joined_as or Membership.from_environment()
    key = hmac.new(joined_as.key, b"tf.data service\0" + salt, hashlib.sha256).digest()
    try:
        where = None
        if rank() == 0:
            service = ComputeService(dispatchers, workers, key, grace_s=timeout)
            where = service.addresses(), service.machine()
        addresses, machine = broadcast_object(where, name="TfDataServiceConfig.addresses")
        config = TfDataServiceConfig(dispatchers, workers, dispatcher_side, addresses, key, timeout, machine)
        if service is not None:
            config.write(configfile)
            written = True
        serve(config, leaves)  # returns when all ranks have received the shutdown from the registry
    finally:
        if service is not None:
            service.shutdown()
        if written:
            remove_file(configfile)


def parse(arguments: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """Parse the command line; None: that of this process."""
    parser = argparse.ArgumentParser(
        prog="python -m ringcomm.tensorflow.data.compute_worker",
        description="Prepare data for training ranks. Start it with ringrun.",
    )
    parser.add_argument("configfile", help="file for the configuration that training ranks read")
    parser.add_argument(
        "--dispatchers", type=int, default=1,
        help="number of dispatchers: 1, or the number of training ranks [1]",
    )  # fmt: skip
    parser.add_argument(
        "--dispatcher-side", choices=SIDES, default="compute", help="which job runs the dispatchers [compute]"
    )
    parser.add_argument(
        "--timeout", type=int, default=60,
        help="seconds to wait for all processes to start, and for another training process after the last "
        "one has disconnected [60]",
    )  # fmt: skip
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = parse()
    main(options.dispatchers, options.dispatcher_side, options.configfile, options.timeout, leaves=True)
