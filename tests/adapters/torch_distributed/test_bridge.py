"""PyTorch's tensors, types, reductions and arguments, as those of ringcomm."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from ringcomm.errors import Misuse, UnsupportedDtypeError
from ringcomm.group.message_channel import SHORT_BYTES, Disagreement
from ringcomm.torch.distributed._bridge import (
    GroupOperand,
    GroupReduction,
    Parts,
    bounds_of,
    even_parts,
    row_parts,
    type_code,
    type_name,
)
from ringcomm.torch.distributed._group import address_of, pairs_of, reduction_of, root_of, single
from tests.support.messages import TAG, Pair, receive


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


@pytest.mark.parametrize("size", [8, SHORT_BYTES + 4])
def test_a_receive_of_another_type_is_found(size):
    pair, place = Pair(type_name=type_name), receive(0, size)
    place.elements = type_code(torch.int32)
    pair.post(place)
    pair.send(TAG, bytes(size), type_code(torch.float32))
    with pytest.raises(Disagreement, match=f"{size} bytes of int32, .* send.{size} bytes of float32"):
        pair.move()


def test_types_have_codes_of_their_own():
    dtypes = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    assert len({type_code(dtype) for dtype in dtypes}) == len(dtypes) > 20
    assert type_code(torch.float32) == 0xD8CA9648
    assert [type_name(type_code(dtype)) for dtype in (torch.bool, torch.bfloat16)] == ["bool", "bfloat16"]
    assert "does not have" in type_name(1)


class TestArguments:
    def test_one_tensor_at_a_time(self):
        tensor = torch.ones(2)
        assert single(tensor) is tensor and single([tensor]) is tensor
        for tensors in ([], [tensor, tensor]):
            with pytest.raises(Misuse, match=f"one tensor at a time, not {len(tensors)}"):
                single(tensors)

    def test_tags_have_32_bits(self):
        assert address_of(7) == (0, 7) and address_of(-(1 << 31)) == (0, -(1 << 31))
        for tag in (1 << 31, -(1 << 31) - 1):
            with pytest.raises(Misuse, match=f"tag={tag}: tags are whole numbers of 32 bits"):
                address_of(tag)
        with pytest.raises(TypeError):
            address_of(1.5)

    def test_as_many_outputs_as_inputs(self):
        one, two = torch.ones(1), torch.ones(2)
        assert pairs_of([one, two], [two, one]) == [(one, two), (two, one)]
        with pytest.raises(Misuse, match="2 inputs need as many outputs, not 1"):
            pairs_of([one], [one, two])

    def test_without_options_it_is_a_sum_to_rank_0(self):
        assert reduction_of(None) == GroupReduction.of(dist.ReduceOp.SUM) and root_of(None) == 0
        options = dist.ReduceOptions()
        options.reduceOp, options.rootRank = dist.ReduceOp.MAX, 3
        assert reduction_of(options) == GroupReduction.of(dist.ReduceOp.MAX) and root_of(options) == 3


class TestReductions:
    def test_a_factor_is_one_number(self):
        for factor in (0.5, torch.tensor(0.5), torch.tensor([0.5])):
            how = GroupReduction.of(dist._make_nccl_premul_sum(factor))
            contribution = torch.tensor([2.0, 4.0]).numpy()
            how.prepare(contribution)
            assert how.factor == 0.5 and contribution.tolist() == [1.0, 2.0]
        several = SimpleNamespace(op=dist.ReduceOp.PREMUL_SUM, factor=torch.tensor([0.5, 2.0]))
        with pytest.raises(Misuse, match="PREMUL_SUM needs one factor for the whole tensor"):
            GroupReduction.of(several)  # newer versions of PyTorch refuse to make it

    def test_what_it_does_not_have(self):
        with pytest.raises(Misuse, match="'nonsense' is not a reduction that the backend"):
            GroupReduction.of("nonsense")
