"""``python -m ringcomm.rendezvous``: serve a job's rendezvous in a process of its own.

It reads the same variables as the ranks: ``RINGCOMM_RENDEZVOUS`` (where to listen), ``RINGCOMM_SIZE``,
the key and the job's name. It ends when the job does, with exit code 0 if the job ended well.
"""

from __future__ import annotations

import logging
import queue
import sys

from ..config import Membership, Settings
from ..endpoints import format_endpoint
from ..errors import RingcommError
from ..transport.encryption import encryption_of
from .actions import Notice
from .server import RendezvousServer


def main() -> int:
    """Serve until the job has ended; the exit code."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    notices: queue.SimpleQueue[Notice] = queue.SimpleQueue()
    try:
        membership = Membership.from_environment()
        settings = Settings.from_environment()
        if membership.size < 2:
            print("A rendezvous is for jobs of two or more ranks: set RINGCOMM_SIZE.", file=sys.stderr)
            return 2
        ports = {port for _, port in membership.rendezvous}
        server = RendezvousServer(
            key=membership.key,
            job=membership.job,
            size=membership.size,
            addresses=[host for host, _ in membership.rendezvous],
            start_timeout_s=settings.start_timeout_s,
            notify=notices.put,
            port=ports.pop(),
            encryption=encryption_of(membership.certificate, settings.encrypt),
            forwarded=settings.allow_forwarding,
        )
        for address, port in server.start():
            print(f"rendezvous of {membership.size} ranks at {format_endpoint(address, port)}", flush=True)
    except RingcommError as problem:
        print(problem, file=sys.stderr)
        return 2
    code = 1
    while True:
        notice = notices.get()
        print(f"{notice.kind}: {notice.text}", flush=True)
        if notice.kind in ("ended", "failed"):
            code = 0 if notice.kind == "ended" else 1
            break
    # Give the ranks time to read the root cause, and to start another generation.
    server.wait_idle(5.0)
    server.stop()
    return code


if __name__ == "__main__":
    sys.exit(main())
