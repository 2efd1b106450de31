"""The registry of those that prepare data, over real sockets: waiting, refusing, ending."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Callable, Iterator

import pytest

from ringcomm.clock import Deadline
from ringcomm.data_service import service as module
from ringcomm.data_service.service import JOB, ComputeClient, ComputeService
from ringcomm.errors import (
    AuthenticationError,
    ConfigError,
    PeerLostError,
    RefusedError,
    StartTimeoutError,
)
from ringcomm.rendezvous.message_server import MessageServer
from ringcomm.transport.nics import own_addresses
from ringcomm.wire.auth import Purpose
from ringcomm.wire.messages import Message, encode
from ringcomm.wire.signing import Session
from tests.support.service import eventually, opened, remains

KEY = bytes(range(32))


@pytest.fixture
def service() -> Iterator[ComputeService]:
    before = opened()
    service = ComputeService(2, 2, KEY)
    yield service
    service.shutdown()
    assert eventually(lambda: not remains(before)), remains(before)


def client_of(service: ComputeService, key: bytes = KEY) -> ComputeClient:
    return ComputeClient(service.addresses(), key)


def in_thread(pool: ThreadPoolExecutor, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    future = pool.submit(function, *arguments)
    assert not wait([future], 0.2).done
    return future


def test_waiting_for_a_dispatcher_and_its_workers(service: ComputeService) -> None:
    client = client_of(service)
    with ThreadPoolExecutor() as pool:
        address = in_thread(pool, client.wait_for_dispatcher_registration, 1, 20)
        client.register_dispatcher(0, "grpc://elsewhere:1")
        client.register_dispatcher(1, "grpc://here:1")
        assert address.result(10) == "grpc://here:1"
        workers = in_thread(pool, client.wait_for_dispatcher_worker_registration, 1, 20)
        client.register_worker_for_dispatcher(1, 3)
        client.register_worker_for_dispatcher(1, 2)
        assert workers.result(10) is None
        assert client.wait_for_dispatcher_registration(0, 1) == "grpc://elsewhere:1"


def test_a_wait_that_ends_names_what_is_missing(service: ComputeService) -> None:
    client = client_of(service)
    with pytest.raises(StartTimeoutError, match=r"0.2 s dispatcher 1 has not been registered by rank 2\."):
        client.wait_for_dispatcher_registration(1, 0.2, "rank 2")
    client.register_worker_for_dispatcher(1, 2)
    with pytest.raises(StartTimeoutError, match=r"these have not registered: rank 3 of the compute job\."):
        client.wait_for_dispatcher_worker_registration(1, 0.2)


def test_the_end_reaches_all_that_wait_for_it(service: ComputeService) -> None:
    client = client_of(service)
    with ThreadPoolExecutor() as pool:
        waiting = [in_thread(pool, client.wait_for_shutdown) for _ in range(3)]
        client_of(service).shutdown()
        assert [item.result(10) for item in waiting] == [""] * 3
    client.wait_for_shutdown()
    with pytest.raises(RefusedError, match="training has ended"):
        client.register_worker_for_dispatcher(0, 0)


def test_the_end_is_told_when_the_service_ends(service: ComputeService) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = in_thread(pool, client_of(service).wait_for_shutdown)
        service.shutdown()
        assert waiting.result(10) == ""


TRAINS = """
import sys
from ringcomm.data_service.service import ComputeClient
client = ComputeClient({"lo": [("127.0.0.1", int(sys.argv[1]))]}, bytes(range(32)))
client.stay(20)
client.stay(20)
print("trains", flush=True)
sys.stdin.read()
"""


def test_training_processes_that_are_killed_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGCOMM_IFACE", "lo")
    service = ComputeService(1, 1, KEY, grace_s=0.5)
    port = next(port for pairs in service.addresses().values() for host, port in pairs if host == "127.0.0.1")

    def train() -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", TRAINS, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdout is not None and process.stdout.readline() == b"trains\n"
        return process

    def end(process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.communicate()

    try:
        with ThreadPoolExecutor() as pool:
            waiting = in_thread(pool, client_of(service).wait_for_shutdown)
            first, second = train(), train()
            end(first)
            assert not wait([waiting], 0.8).done, "one of them trains still"
            end(second)
            assert "hung up 0.5 s ago without saying that training is over" in waiting.result(10)
    finally:
        service.shutdown()


@pytest.mark.full
def test_a_registry_that_goes_away_is_named(service: ComputeService) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = in_thread(pool, client_of(service).wait_for_shutdown)
        service.stop()  # as if its process had been killed: nothing is said
        with pytest.raises(PeerLostError, match="is gone .*: rank 0 of the compute job"):
            waiting.result(10)
    with pytest.raises(StartTimeoutError, match=r"(?s)No answer.*connection refused.*still run"):
        client_of(service).wait_for_dispatcher_registration(0, 60)


def test_another_key_is_refused(service: ComputeService) -> None:
    with pytest.raises(AuthenticationError, match="does not hold this job's key"):
        client_of(service, b"another key, as long as the first").shutdown()
    client_of(service).register_worker_for_dispatcher(0, 0)


def test_another_version_is_refused_for_its_version(service: ComputeService) -> None:
    """In a process of its own, since the version is that of a whole process."""
    program = (
        "import sys, ringcomm.wire.auth as auth; auth.PROTOCOL_VERSION = 99\n"
        "from ringcomm.data_service.service import ComputeClient\n"
        f"ComputeClient({service.addresses()!r}, {KEY!r}).shutdown()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "RefusedError: The registry of data workers at " in done.stderr, done.stderr
    assert "install the same ringcomm on both hosts" in done.stderr


def test_what_it_refuses_is_raised(service: ComputeService) -> None:
    with pytest.raises(RefusedError, match="there is no dispatcher 2: there are 2"):
        client_of(service).wait_for_dispatcher_registration(2, 5)


def test_garbage_and_messages_for_others_do_not_disturb_it(service: ComputeService) -> None:
    for pairs in service.addresses().values():
        for address, port in pairs:
            with socket.create_connection((address, port)) as unauthenticated:
                unauthenticated.sendall(b"GET / HTTP/1.0\r\n\r\n" * 20)
    client_of(service).register_dispatcher(0, "grpc://here:1")


def test_an_address_of_this_machine_does_not_lead_to_another(
    service: ComputeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The configuration says where the registry runs; without that, every address is dialled."""
    monkeypatch.setattr(module, "REFUSED_S", 0.0)
    away = ComputeClient(service.addresses(), KEY, compute_machine="another one")
    with pytest.raises(StartTimeoutError, match="not dialled, because this machine has that address itself"):
        away.register_dispatcher(0, "grpc://here:1")
    for where in ("", service.machine()):
        ComputeClient(service.addresses(), KEY, compute_machine=where).register_dispatcher(0, "grpc://a:1")


def test_it_listens_on_single_addresses_and_where_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGCOMM_IFACE", "lo")
    service = ComputeService(1, 1, KEY)
    try:
        assert list(service.addresses()) == ["lo"]
        assert client_of(service).own_address(5) in ("127.0.0.1", "::1")
    finally:
        service.shutdown()
    monkeypatch.delenv("RINGCOMM_IFACE")
    service = ComputeService(1, 1, KEY)
    try:
        listed = {address for pairs in service.addresses().values() for address, _ in pairs}
        assert listed <= {item.address for item in own_addresses()}
        assert client_of(service).own_address(5) == own_addresses()[0].address
    finally:
        service.shutdown()
    assert not [item for item in threading.enumerate() if "registry" in item.name]


@pytest.mark.parametrize("numbers", [(0, 1), (1, 0)])
def test_there_must_be_a_worker(numbers: Any) -> None:
    with pytest.raises(ConfigError, match="at least one dispatcher"):
        ComputeService(*numbers, KEY)


def test_a_training_process_is_registered_once_and_until_its_connection_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_training_connections", {})
    service = ComputeService(1, 1, KEY, grace_s=0.2)
    try:
        client_of(service).stay(60)
        client_of(service).stay(60)
        (connection,) = module._training_connections.values()
        with ThreadPoolExecutor() as pool:
            waiting = in_thread(pool, client_of(service).wait_for_shutdown)
            connection.close()
            assert "hung up 0.2 s ago" in waiting.result(60)
        module._training_connections.clear()
        with pytest.raises(RefusedError, match="training has ended"):
            client_of(service).stay(60)
    finally:
        service.shutdown()


class Scripted(MessageServer):
    """A server with the registry's key that answers every message as a test says."""

    def __init__(self, answer: Callable[[Scripted, int], None], address: str = "127.0.0.1") -> None:
        super().__init__(
            title="scripted registry", key=KEY, job=JOB, purpose=Purpose.COMPUTE, addresses=[address]
        )
        self._answer = answer
        self.client = ComputeClient({"lo": self.start()}, KEY)

    def received(self, number: int, message: Message) -> None:
        self._answer(self, number)

    def send_bytes(self, number: int, data: bytes) -> None:
        self._connections[number].sock.sendall(data)

    def reset(self, number: int) -> None:
        """Close a connection so that the client gets an error, not an end."""
        linger = struct.pack("ii", 1, 0)
        self._connections[number].sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.drop(number)


def with_wrong_tag(server: Scripted, number: int) -> None:
    server.send_bytes(number, encode({"type": "noted"}, Session(bytes(32), bytes(32))))


def test_each_way_in_which_a_registry_fails_is_an_error_that_says_how() -> None:
    def registers(client: ComputeClient) -> None:
        client.register_dispatcher(0, "grpc://here:1")

    for answer, text in (
        (lambda server, number: server.drop(number), r"is gone \(it closed the connection\)"),
        (lambda server, number: server.reset(number), r"is gone \(connection reset by peer\)"),
        (with_wrong_tag, r"is gone \(control message number 1 on this connection does not carry the tag"),
        (
            lambda server, number: server.send_message(number, {"type": "over", "reason": ""}),
            r"is gone \(it sent 'over' where 'noted' belongs\)",
        ),
    ):
        server = Scripted(answer)
        try:
            with pytest.raises(PeerLostError, match=text) as raised:
                registers(server.client)
            assert raised.value.rank == 0
        finally:
            server.stop()


def test_a_registry_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ANSWER_S", 0.5)
    server = Scripted(lambda *_: None)
    try:
        with pytest.raises(StartTimeoutError, match="127.0.0.1 took 'dispatcher' and has not answered withi"):
            server.client.register_dispatcher(0, "grpc://here:1")
        with pytest.raises(StartTimeoutError, match=r"127.0.0.1 has not answered within 0.5 s\."):
            server.client.wait_for_dispatcher_worker_registration(0, 0.5)
    finally:
        server.stop()


def test_a_request_on_a_connection_that_has_ended_is_an_error(service: ComputeService) -> None:
    with client_of(service)._connect(Deadline(60)) as connection:
        connection._sock.shutdown(socket.SHUT_WR)
        with pytest.raises(PeerLostError, match=r"is gone \(broken pipe\)"):
            connection.send({"type": "finish"})


def test_the_own_address_is_the_one_from_which_the_registry_is_reached() -> None:
    """The loopback's addresses are all on this host; 127.0.0.2 is reached from 127.0.0.1."""
    server = Scripted(lambda *_: None, "127.0.0.2")
    try:
        assert server.client.own_address(60) == "127.0.0.1"
    finally:
        server.stop()


def test_keepalive_is_left_out_where_the_system_lacks_it(
    service: ComputeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("TCP_OF_ANOTHER_SYSTEM", 1), ("TCP_KEEPIDLE", -1), ("TCP_KEEPIDLE", 7)  # the second is refused
    monkeypatch.setattr(module, "_ALIVE", options)
    with client_of(service)._connect(Deadline(60)) as connection:
        assert connection._sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert connection._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 7
