"""Starting and stopping the servers of TensorFlow's data service.

TensorFlow holds the interpreter lock while it stops or destroys such a server, so that this rank sends no
heartbeats meanwhile; the program of a compute job leaves the job before. Stopping a worker waits for the
elements that are being prepared; if one of them needs a split of the dataset from a dispatcher that has
stopped, the worker asks for it until the dispatcher's timeout is over. That timeout is shorter than the
failure detector's, for ranks that are in a job.
"""

from __future__ import annotations

import ctypes
from typing import Any, Optional

import tensorflow as tf

from ...config import Settings

_HEARTBEAT_MS = 1000
_ATTEMPTS = 3
"""This part of the failure detector's time a worker may spend on a dispatcher that does not answer."""


def start_dispatcher() -> Any:
    """A running dispatcher."""
    return tf.data.experimental.service.DispatchServer()


def start_worker(dispatcher: str, host: str, timeout_s: float) -> Any:
    """A running worker.

    Args:
        dispatcher: the dispatcher's address with its protocol.
        host: the address at which training ranks reach this host.
        timeout_s: how long the dispatcher may not answer, in seconds.
    """
    # TensorFlow replaces %port% by the port that the system has chosen.
    shown = f"[{host}]" if ":" in host else host
    config = tf.data.experimental.service.WorkerConfig(
        dispatcher_address=dispatcher.partition("://")[2],
        worker_address=f"{shown}:%port%",
        heartbeat_interval_ms=_HEARTBEAT_MS,
        dispatcher_timeout_ms=int(1000 * dispatcher_timeout_s(timeout_s, Settings.from_environment())),
    )
    return tf.data.experimental.service.WorkerServer(config)


def dispatcher_timeout_s(timeout_s: float, settings: Settings) -> float:
    """Return how long a worker waits for a dispatcher that does not answer, in seconds.

    Well within DEAD_AFTER.
    """
    limit_s = settings.dead_after_s / _ATTEMPTS
    return min(timeout_s, limit_s) if limit_s else timeout_s


def stop(server: Optional[Any]) -> None:
    """Stop a worker or a dispatcher, if there is one; a second time without effect.

    It is never destroyed: its destructor would wait, with the interpreter lock, for a thread that may be
    waiting for another process.
    """
    if server is None:
        return
    server._stop()  # older versions of TensorFlow have no other name for it
    server.join()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(server._server))
