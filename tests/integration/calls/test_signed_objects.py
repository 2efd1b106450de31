"""What is unpickled has been signed by the rank that it comes from, whatever relays the bytes."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack

import cloudpickle
import pytest

from ringcomm import api
from ringcomm._adapter import submit as by_name
from ringcomm.calls.objects import Objects, Packed
from ringcomm.errors import Misuse, ProtocolError, RingcommError
from ringcomm.rendezvous import links
from ringcomm.transport import connect
from ringcomm.transport.connect import Dial
from ringcomm.wire.auth import Signer
from tests.support.relay import Relay
from tests.support.service import Service, together

SIGNER = Signer(b"k" * 32, "job", 0)


class Trap:
    """Runs code when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.fixture
def contexts(no_leaks):
    with ExitStack() as stack:
        service = Service(3)
        stack.callback(service.server.stop)
        yield service.start_all(stack)


def test_a_pickle_without_a_signature_runs_nothing(contexts, tmp_path):
    """As a process would that has taken over an unencrypted link: the bytes of one rank are not its own."""
    trap = tmp_path / "run"
    contexts[0].objects.pack = lambda *_: Packed(memoryview(cloudpickle.dumps(Trap(trap))))

    def call(context):
        try:
            context.broadcast_object("harmless", root_rank=0, name="start")
        except ProtocolError as problem:
            return str(problem)
        return ""

    texts = together(contexts, call)
    assert not trap.exists()
    for text in texts[1:]:
        assert "broadcast_object(name='start') as rank 0's object was not unpickled" in text, texts


def test_the_same_for_the_engine(contexts, tmp_path, monkeypatch):
    trap = tmp_path / "run"
    forged = cloudpickle.dumps(Trap(trap))
    contexts[2].objects.pack = lambda *_: Packed(memoryview(forged))
    local = {}
    monkeypatch.setattr(api, "context", lambda: local[_thread()])

    def call(context):
        local[_thread()] = context
        try:
            by_name.allgather_object("harmless", "both")
        except ProtocolError as problem:
            return str(problem)
        return ""

    texts = together(contexts, call)
    assert not trap.exists()
    assert all("rank 2's object was not unpickled" in text for text in texts), texts


def test_what_cannot_be_pickled_is_one_error_of_all_ranks(contexts, monkeypatch):
    """The others do not wait for ever, and the next calls meet."""
    local = {}
    monkeypatch.setattr(api, "context", lambda: local[_thread()])
    lock = threading.Lock()

    def call(context):
        local[_thread()] = context
        texts = []
        for work in (
            lambda: context.allgather_object(lock if context.rank == 1 else 3),
            lambda: context.broadcast_object(lock, root_rank=1, name="start"),
            lambda: by_name.allgather_object(lock if context.rank == 1 else 3, "both"),
            lambda: by_name.broadcast_object(lock, 1),
        ):
            with pytest.raises(Misuse) as caught:
                work()
            assert (caught.value.__cause__ is not None) == (context.rank == 1)
            texts.append(str(caught.value))
        return texts, context.allgather_object(context.rank)

    found = together(contexts, call)
    texts, ranks = found[0]
    assert found == [found[0]] * 3 and ranks == [0, 1, 2]
    for text, function in zip(texts, ("allgather_object", "broadcast_object") * 2):
        start = f"rank 1's object of type lock cannot be pickled for {function}(): TypeError: cannot pickle"
        assert text.startswith(start), text


def _thread():
    return threading.get_ident()


ABOUT = ("broadcast_object", "name")


def test_an_object_counts_once():
    sender, receiver = Objects(SIGNER, 0), Objects(SIGNER, 1)
    first, second = (sender.pack(value, *ABOUT).data for value in ("first", "second"))
    assert receiver.unpack(first, 0, *ABOUT) == "first"
    with pytest.raises(ProtocolError, match="object number 1 came again"):
        receiver.unpack(first, 0, *ABOUT)
    assert receiver.unpack(second, 0, *ABOUT) == "second"
    with pytest.raises(ProtocolError, match="object number 1 came again"):
        receiver.unpack(first, 0, *ABOUT)


def test_an_object_of_another_job_or_generation_does_not_count():
    for other in (Signer(b"x" * 32, "job", 0), Signer(b"k" * 32, "bob", 0), Signer(b"k" * 32, "job", 1)):
        with pytest.raises(ProtocolError, match="signature"):
            Objects(SIGNER, 1).unpack(Objects(other, 0).pack(1, *ABOUT).data, 0, *ABOUT)


def test_a_relay_between_two_ranks_cannot_have_code_run(no_leaks, tmp_path, monkeypatch):
    """On the wire of a job that is not encrypted a pickle can be put where an object travels."""
    monkeypatch.setattr(connect, "place_here", lambda sock: None)
    trap = tmp_path / "run"
    forged = cloudpickle.dumps(Trap(trap))
    secret = b"harmless" * 40
    changed = []

    def stream(data):
        at = data.find(secret)
        if at < 0:
            return data
        changed.append(at)
        start = data.rfind(b"\x80\x05", 0, at)
        return data[:start] + forged + data[start + len(forged) :]

    with ExitStack() as stack:
        service = Service(2, start_timeout_s=10.0, transport="tcp")
        stack.callback(service.server.stop)

        def by_way_of_a_relay(reactor, where, *rest):
            return Dial(reactor, stack.enter_context(Relay(where, stream=stream)).at, *rest)

        monkeypatch.setattr(links, "Dial", by_way_of_a_relay)
        ranks = service.start_all(stack)
        outcome = together(ranks, exchange)
    assert changed
    assert not trap.exists()
    assert isinstance(outcome[1], ProtocolError), outcome


def exchange(context):
    try:
        return context.broadcast_object(b"harmless" * 40, root_rank=0)
    except RingcommError as problem:
        return problem
