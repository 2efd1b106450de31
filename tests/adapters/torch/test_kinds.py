"""Tensors as arrays of the engine: what is read and shared."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ringcomm.arrays.torch_tensors import KIND
from ringcomm.errors import UnsupportedDtypeError
from ringcomm.torch import tensors


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

    @pytest.mark.parametrize("shape", [(), (0, 3)])
    def test_tensors_without_dimensions_or_elements(self, shape):
        tensor = torch.ones(shape, dtype=torch.bfloat16)
        operand = tensors.operand_of(tensor, "allreduce_", in_place=True)
        assert operand.shape == shape and operand.dtype.name == "bfloat16"
        operand.flat += 1
        assert operand.finish() is tensor and tensor.tolist() == torch.full(shape, 2.0).tolist()
        rows = operand.deliver(np.full(shape, 3.0).astype(operand.dtype))
        assert rows.dtype == torch.bfloat16 and rows.shape == shape
