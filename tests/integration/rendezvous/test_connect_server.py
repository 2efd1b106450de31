"""Which addresses of a server are dialled, and in which order."""

from __future__ import annotations

import socket

import pytest

from ringcomm.configuration.membership import format_endpoint
from ringcomm.rendezvous import connect_server as module
from ringcomm.rendezvous.connect_server import reach
from tests.support.service import CLAIM, JOB, KEY, Service


@pytest.fixture
def server(no_leaks):
    service = Service(2)
    service.server._key, service.server._job = KEY, JOB
    service.server._acceptor.key, service.server._acceptor.job = KEY, JOB
    yield service.endpoints[0]
    service.server.stop()


@pytest.fixture
def listener(no_leaks):
    """Another server, which would notice if it were dialled."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        sock.settimeout(0.05)
        yield sock


def dialled(listener):
    try:
        listener.accept()[0].close()
    except socket.timeout:
        return False
    return True


def test_an_address_of_this_machine_does_not_lead_to_another(reactor, listener):
    """docker0 has the same address on many hosts, and any user can listen there."""
    where = listener.getsockname()
    found = reach(reactor, [where], KEY, CLAIM, None, 5.0, elsewhere=True)
    assert found.sock is None
    (line,) = found.tried
    assert f"127.0.0.1:{where[1]}: not dialled, because this machine has that address itself" in line
    assert not dialled(listener)


@pytest.mark.parametrize("silent", [False, True], ids=["refused", "silent"])
def test_what_is_for_later_is_dialled_when_no_other_answers(reactor, server, silent, monkeypatch):
    monkeypatch.setattr(module, "_LATER_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as other:
        where = other.getsockname()
        if not silent:
            other.close()
        found = reach(reactor, [where], KEY, CLAIM, None, 5.0, later=[server])
        assert found.sock is not None and found.sock.getpeername() == server
        found.sock.close()


@pytest.mark.parametrize("host", ["desk..local", "x" * 70 + ".local"])
def test_a_name_that_can_be_none_is_a_line_among_what_was_tried(reactor, server, host):
    """Python refuses to look it up by a UnicodeError, which is no OSError."""
    assert reach(reactor, [(host, 5000), server], KEY, CLAIM, None, 5.0).sock.close() is None
    found = reach(reactor, [(host, 5000)], KEY, CLAIM, None, 5.0)
    assert found.sock is None
    (line,) = found.tried
    assert line.startswith(f"  {host}: ") and "label" in line


def test_a_server_with_another_key_is_told_from_one_that_is_silent(reactor, server, listener):
    found = reach(reactor, [server], b"x" * 32, CLAIM, None, 30.0)
    assert found.sock is None and not found.silent
    where, reason = format_endpoint(*found.refused.address), found.refused.reason
    assert where == f"127.0.0.1:{server[1]}" and "does not hold this job's key" in reason
    assert found.tried == [f"  {where}: {reason}"]
    found = reach(reactor, [listener.getsockname()], KEY, CLAIM, None, 0.05)
    assert found.sock is None and found.silent and found.refused is None
    assert found.tried == [f"  127.0.0.1:{listener.getsockname()[1]}: no answer within 0.05 s"]
