"""Tensors as flat NumPy arrays, and as parts of one array."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from ringcomm.errors import Misuse, UnsupportedDtypeError
from ringcomm.torch.distributed._bridge import GroupOperand, Parts, bounds_of, even_parts, row_parts


class TestFlatArrays:
    def test_contiguous_memory_is_shared_and_other_is_written_back(self):
        tensor = torch.zeros(2, 3, requires_grad=True)
        GroupOperand(tensor).flat[5] = 1.0
        assert tensor[1, 2].item() == 1.0
        turned = torch.zeros(3, 2).t()
        operand = GroupOperand(turned)
        operand.flat[1] = 1.0
        assert turned[0, 1].item() == 0.0
        operand.finish()
        assert turned.tolist() == [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
        assert GroupOperand(torch.tensor([1 + 2j]).conj()).flat.tolist() == [1 - 2j]

    def test_types_that_numpy_lacks_are_moved_by_their_size(self):
        operand = GroupOperand(torch.ones(3, dtype=torch.bfloat16))
        assert (operand.dtype.name, operand.moved_as) == ("int16", "torch.bfloat16")
        operand = GroupOperand(torch.ones(3, dtype=torch.bfloat16), arithmetic=True)
        assert (operand.dtype.name, operand.moved_as) == ("bfloat16", "")
        assert GroupOperand(torch.ones(3, dtype=torch.float8_e5m2)).dtype.name == "uint8"
        with pytest.raises(UnsupportedDtypeError, match="torch.float8_e5m2 cannot be reduced"):
            GroupOperand(torch.ones(3, dtype=torch.float8_e5m2), arithmetic=True)

    def test_only_dense_tensors_of_the_cpu(self):
        for tensor in (torch.ones(2).to_sparse(), torch.ones(2, device="meta")):
            with pytest.raises(Misuse, match="supports dense tensors in the CPU's memory; this one is on"):
                GroupOperand(tensor)

    def test_equal_parts(self):
        assert even_parts(6, 3) == (0, 2, 4, 6) and even_parts(0, 2) == (0, 0, 0)
        with pytest.raises(Misuse, match="7 elements cannot be divided equally among the 3 ranks"):
            even_parts(7, 3)

    def test_parts_of_rows(self):
        assert row_parts(torch.zeros(5, 2), [1, 0, 4], 3) == (0, 2, 2, 10)
        assert row_parts(torch.zeros(0, 2), [0, 0], 2) == (0, 0, 0)
        for tensor, rows in ((torch.zeros(5), [1, 3]), (torch.zeros(5), [5]), (torch.zeros(()), [1, 0])):
            with pytest.raises(Misuse, match="alltoall"):
                row_parts(tensor, rows, 2)

    def test_several_tensors_are_copied_to_one_array_and_back(self):
        tensors = [torch.zeros(2, 2).t(), torch.zeros(0), torch.zeros(3)]
        operands = [GroupOperand(tensor) for tensor in tensors]
        parts = Parts(operands, bounds_of(tensors), torch.empty(7).numpy())
        assert parts.bounds == (0, 4, 4, 7) and parts.load().tolist() == [0.0] * 7
        parts.array[:] = range(7)
        assert parts.part(2).tolist() == [4.0, 5.0, 6.0]
        assert tensors[2].tolist() == [0.0] * 3
        parts.finish()
        assert [tensor.tolist() for tensor in tensors] == [[[0.0, 1.0], [2.0, 3.0]], [], [4.0, 5.0, 6.0]]

    def test_one_tensor_is_not_copied(self):
        turned = torch.zeros(3, 2).t()
        parts = Parts([GroupOperand(turned)], even_parts(6, 3))
        parts.load()[1] = 1.0
        parts.finish()
        assert turned.tolist() == [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
