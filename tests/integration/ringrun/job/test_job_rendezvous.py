"""The rendezvous servers that a job opens: they listen, and are closed."""

from __future__ import annotations

import socket
from typing import Any, List

import pytest

from ringcomm.config import Slot
from ringrun.elastic.job import ElasticJob
from ringrun.job.launch import prepare
from ringrun.job.rendezvous import rendezvous_for
from ringrun.plan.options import Options

LIMIT_S = 60.0


def test_the_rendezvous_of_a_job_is_open_on_the_loopback(no_leaks: None) -> None:
    notices: List[Any] = []
    server = rendezvous_for(prepare(Options(np=2), ["true"]))(notices.append)
    try:
        ((address, port),) = server.start()
        assert address == "127.0.0.1"
        socket.create_connection((address, port), LIMIT_S).close()
        server.process_exited(1, "exit code 3", False)
    finally:
        server.stop()
    with pytest.raises(OSError):
        socket.create_connection((address, port), LIMIT_S)


def test_the_rendezvous_of_an_elastic_job_has_the_limits_of_the_job(no_leaks: None) -> None:
    options = Options(hosts="localhost:2", min_np=2)
    job = prepare(options, ["true"])
    assert isinstance(job, ElasticJob)
    notices: List[Any] = []
    server = rendezvous_for(job)(notices.append)
    try:
        endpoints = server.start()
        assert "127.0.0.1" in [address for address, _ in endpoints]
        server.expect(0, Slot(0, 0), "localhost")
        server.process_exited(0, "exit code 3", False)
    finally:
        server.stop()
