"""Tensors as arrays of the engine: what is read and shared, and which calls copies on a CUDA device make.

Streams and events are stand-ins here; what hardware does with these calls is tested where there is some
(``bash tests/run.sh --gpu``).
"""

from __future__ import annotations

import contextlib
import logging

import numpy as np
import pytest
import torch

from ringcomm.arrays.torch_tensors import KIND, TorchEngine
from ringcomm.errors import DeviceError, Misuse, UnsupportedDtypeError
from ringcomm.torch import tensors


class Event:
    def __init__(self, calls):
        self.calls, self.broken = calls, False

    def record(self, stream):
        self.stream = stream.name
        self.calls.append(f"record on {stream.name}")

    def query(self):
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return True


class Stream:
    def __init__(self, calls, name):
        self.calls, self.name = calls, name

    def wait_event(self, event):
        self.calls.append(f"{self.name} waits for {event.stream}")


@pytest.fixture
def calls(monkeypatch):
    """The calls of ``torch.cuda`` in their order; the first stream is for copies to the host."""
    found, made = [], []

    def stream(device):
        made.append(Stream(found, ("out", "in")[len(made)]))
        return made[-1]

    @contextlib.contextmanager
    def current(chosen):
        found.append(f"on {chosen.name}")
        yield

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(found))
    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(found, "the program's"))
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: found.append(f"kept for {stream.name}")
    )
    return found


def test_a_copy_to_the_host_waits_for_the_program(calls):
    engine = TorchEngine("cuda:0")
    tensor = torch.arange(4, dtype=torch.int32)
    mark = engine.mark()
    block = np.zeros(16, np.uint8)
    done = engine.to_host(tensor, 4, 12, block, mark)
    assert block.view(np.int32).tolist() == [0, 1, 2, 0]
    assert calls == [
        "record on the program's", "on out", "out waits for the program's", "record on out",
        "kept for out",
    ]  # fmt: skip
    assert done.poll()


def test_the_program_follows_a_copy_to_the_device(calls):
    engine = TorchEngine("cuda:0")
    tensor = torch.zeros(4, dtype=torch.int32)
    block = np.array([7, 8, 9, 10], np.int32).view(np.uint8)
    engine.follow(engine.to_device(block, tensor, 4, 12, None))
    assert tensor.tolist() == [0, 8, 9, 0]
    assert calls == ["on in", "record on in", "kept for in", "the program's waits for in"]


def test_what_the_device_reports(calls):
    engine = TorchEngine("cuda:0")
    done = engine.to_host(torch.zeros(2), 0, 8, np.zeros(8, np.uint8), None)
    done.event.broken = True
    with pytest.raises(DeviceError, match="a copy has failed on the device: .*illegal memory access"):
        done.poll()
    with pytest.raises(DeviceError, match="a copy could not be started on cuda:0: "):
        engine.to_host(torch.zeros(2), 0, 8, np.zeros(3, np.uint8), None)  # sizes differ


def test_where_memory_cannot_be_page_locked_that_is_reported_once(calls, monkeypatch, caplog):
    empty, asked = torch.empty, []

    def refuse(*shape, pin_memory=False, **options):
        asked.append(pin_memory)
        if pin_memory:
            raise RuntimeError("no room")
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", refuse)
    engine = TorchEngine("cuda:0")
    with caplog.at_level(logging.WARNING):
        blocks = [engine.block(24), engine.block(8)]
    assert [(block.nbytes, block.dtype) for block in blocks] == [(24, np.uint8), (8, np.uint8)]
    assert asked == [True]
    (record,) = caplog.records
    assert "cannot be page-locked (no room)" in record.getMessage() and "cuda:0" in record.getMessage()


def test_memory_is_page_locked_where_that_is_possible(calls, monkeypatch):
    empty, asked = torch.empty, []

    def grant(*shape, pin_memory=False, **options):
        asked.append(pin_memory)
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", grant)
    engine = TorchEngine("cuda:0")
    assert (engine.block(24).nbytes, engine.block(8).nbytes) == (24, 8)
    assert asked == [True, True]


def test_what_a_tensor_is():
    tensor = torch.zeros(2, 3, dtype=torch.bfloat16)
    assert not KIND.on_device(tensor) and KIND.device(tensor) == "cpu"
    shape, dtype = KIND.describe(tensor)
    assert shape == (2, 3) and dtype.name == "bfloat16"
    with pytest.raises(UnsupportedDtypeError, match="torch.bits8 cannot be sent"):
        KIND.describe(torch.empty(2, dtype=torch.bits8))


def test_the_elements_are_shared_if_that_is_possible():
    tensor = torch.arange(6.0).view(2, 3)
    flat, shared = KIND.flat(tensor)
    assert shared and flat.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    for other in (tensor.t(), torch.tensor([1 + 2j]).conj()):
        flat, shared = KIND.flat(other)
        assert not shared and flat.tolist() == other.resolve_conj().reshape(-1).tolist()
    with pytest.raises(Misuse, match="to_dense"):
        KIND.flat(tensor.to_sparse())


def test_the_memory_of_a_tensor_of_the_cpu():
    tensor = torch.zeros(2, 3, requires_grad=True)
    memory = KIND.host_memory(tensor)
    memory[1, 2] = 7.0
    assert tensor[1, 2].item() == 7.0
    half = torch.ones(4, dtype=torch.bfloat16)
    memory = KIND.host_memory(half)
    assert memory.dtype.name == "bfloat16"
    memory[0] = 3.0
    assert half[0].item() == 3.0
    assert KIND.host_memory(torch.tensor([1 + 2j]).conj()) is None
    with pytest.raises(UnsupportedDtypeError, match="on dense tensors, not on torch.sparse_coo"):
        KIND.host_memory(tensor.detach().to_sparse())
    with pytest.raises(UnsupportedDtypeError, match="on the device meta, where tensors have no values"):
        KIND.host_memory(torch.zeros(2, device="meta"))
    with pytest.raises(UnsupportedDtypeError, match="torch.float8_e5m2 cannot be sent"):
        KIND.host_memory(torch.zeros(2, dtype=torch.float8_e5m2))


class TestOperandsOfTheCpu:
    def test_one_that_is_overwritten_shares_the_memory_of_its_tensor(self):
        tensor = torch.zeros(2, 3, requires_grad=True)
        operand = tensors.operand_of(tensor, "allreduce_", in_place=True)
        operand.flat[5] = 7.0
        assert operand.shape == (2, 3) and operand.finish() is tensor and tensor[1, 2].item() == 7.0

    def test_one_of_another_layout_is_written_back(self):
        for tensor in (
            torch.arange(6.0).view(2, 3).t(),
            torch.arange(16.0).view(1, 2, 2, 4).contiguous(memory_format=torch.channels_last),
            torch.arange(6.0)[::2],
            torch.tensor([1 + 2j, 3 - 1j]).conj(),
            torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
        ):
            before = tensor.tolist()
            operand = tensors.operand_of(tensor, "allreduce_", in_place=True)
            assert operand.flat.tolist() == tensor.reshape(-1).tolist()
            operand.flat *= 2
            assert tensor.tolist() == before
            assert operand.finish() is tensor and tensor.tolist() == (np.array(before) * 2).tolist()

    def test_a_copy_is_another_tensor_and_has_the_shape_that_is_wanted(self):
        for tensor in (torch.arange(6.0).view(2, 3), torch.arange(6.0).view(3, 2).t()):
            operand = tensors.operand_of(tensor, "allreduce")
            assert operand.flat.tolist() == tensor.reshape(-1).tolist()
            operand.flat[0] = 9.0
            copy = operand.finish()
            assert copy.is_contiguous() and copy.shape == tensor.shape and copy[0, 0].item() == 9.0
            assert operand.finish((6,)).tolist() == [9.0, *tensor.reshape(-1).tolist()[1:]]
            assert tensor[0, 0].item() == 0.0

    def test_rows_are_read_where_they_are_if_the_caller_waits(self):
        tensor = torch.arange(3.0)
        for waits in (False, True):
            operand = tensors.operand_of(tensor, "allgather", rows=True, waits=waits)
            assert np.shares_memory(operand.flat, tensor.numpy()) == waits
            assert operand.deliver(np.ones((2, 2), np.float32)).tolist() == [[1.0, 1.0], [1.0, 1.0]]

    @pytest.mark.parametrize("shape", [(), (0, 3)])
    def test_tensors_without_dimensions_or_elements(self, shape):
        tensor = torch.ones(shape, dtype=torch.bfloat16)
        operand = tensors.operand_of(tensor, "allreduce_", in_place=True)
        assert operand.shape == shape and operand.dtype.name == "bfloat16"
        operand.flat += 1
        assert operand.finish() is tensor and tensor.tolist() == torch.full(shape, 2.0).tolist()
        rows = operand.deliver(np.full(shape, 3.0).astype(operand.dtype))
        assert rows.dtype == torch.bfloat16 and rows.shape == shape
