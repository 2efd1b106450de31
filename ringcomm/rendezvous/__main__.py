"""``python -m ringcomm.rendezvous``: serve a job's rendezvous in a separate process.

It reads the same variables as the ranks: ``RINGCOMM_RENDEZVOUS`` (where to listen), ``RINGCOMM_SIZE``,
the key and the job's name. It ends when the job does, with exit code 0 if the job ended well.

With ``--min-np`` it serves an elastic job: ranks may be lost and may join while the job runs. The ranks need
``RINGCOMM_ELASTIC=1`` in place of ``RINGCOMM_SIZE``; the rendezvous needs neither.
"""

from __future__ import annotations

import argparse
import logging
import queue
import sys
from typing import Any, Dict

from ..config import Membership, Settings
from ..configuration.membership import Limits, format_endpoint
from ..errors import RingcommError
from ..transport.reactor import encryption_of
from .membership import Notice
from .server import RendezvousServer


def main() -> int:
    """Serve until the job has ended; return the exit code."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    arguments = _arguments()
    notices: queue.SimpleQueue[Notice] = queue.SimpleQueue()
    try:
        membership = Membership.from_environment(elastic=arguments.min_np is not None)
        is_named = membership.size >= 2 and membership.launched is None  # not by srun or mpirun
        if arguments.min_np is None and not is_named:
            print("A rendezvous is for jobs of two or more ranks: set RINGCOMM_SIZE.", file=sys.stderr)
            return 2
        server = _server(membership, arguments, notices)
        ranks = f"{membership.size} ranks" if arguments.min_np is None else "an elastic job"
        for address, port in server.start():
            print(f"rendezvous of {ranks} at {format_endpoint(address, port)}", flush=True)
    except RingcommError as problem:
        print(problem, file=sys.stderr)
        return 2
    code = 1
    while True:
        notice = notices.get()
        if notice.text:
            print(f"{notice.kind}: {notice.text}", flush=True)
        if notice.kind in ("ended", "failed"):
            code = 0 if notice.kind == "ended" else 1
            break
    # Give the ranks time to read the root cause, and to start another generation.
    server.wait_idle(5.0)
    server.stop()
    return code


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ringcomm.rendezvous", description=__doc__)
    parser.add_argument("--min-np", type=_positive, help="serve an elastic job; with fewer ranks it waits")
    parser.add_argument("--max-np", type=_positive, help="the most ranks; by default any number")
    parser.add_argument("--np", type=_positive, help="ranks to wait for at the start; by default --min-np")
    return parser.parse_args()


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _server(
    membership: Membership, arguments: argparse.Namespace, notices: queue.SimpleQueue[Notice]
) -> RendezvousServer:
    settings = Settings.from_environment()
    ports = {port for _, port in membership.rendezvous}
    common: Dict[str, Any] = {
        "key": membership.key, "job": membership.job, "notify": notices.put, "port": ports.pop(),
        "addresses": [host for host, _ in membership.rendezvous],
        "start_timeout_s": settings.start_timeout_s,
        "encryption": encryption_of(membership.certificate, settings.encrypt),
    }  # fmt: skip
    if arguments.min_np is None:
        return RendezvousServer(size=membership.size, **common)
    limits = Limits(arguments.np or arguments.min_np, arguments.min_np, arguments.max_np)
    return RendezvousServer(limits=limits, **common)


if __name__ == "__main__":
    sys.exit(main())
