"""What compiled programs call on the host, called directly in one process."""

from __future__ import annotations

from typing import Any, List

import numpy as np
import pytest

pytest.importorskip("jax")

from ringcomm._adapter.graph_callbacks import Operation
from ringcomm._adapter.reduction import Reduction
from ringcomm._adapter.submit import cause_of  # noqa: E402 - these need jax
from ringcomm.calls.process_set import global_process_set as every_rank  # noqa: E402
from ringcomm.collective.call_sites import this_site  # noqa: E402
from ringcomm.errors import MismatchError, NotInitializedError, ShapeError  # noqa: E402
from ringcomm.jax import host_call  # noqa: E402
from ringcomm.jax.host_call import HostCall, SetPosition  # noqa: E402
from ringcomm.ops import ReduceOp  # noqa: E402

ALL = Reduction(process_set=every_rank)
TRIPLED = Reduction(ReduceOp.SUM, 3.0, 1.0, every_rank)


def call_of(operation: Any) -> HostCall:
    return HostCall(operation, host_call.place_for(operation), this_site())


def test_results_on_one_rank(alone: Any) -> None:
    rows = np.arange(6.0).reshape(3, 2)
    for operation, expected in (
        (Operation("allreduce", TRIPLED), 3 * rows), (Operation("reducescatter", TRIPLED), 3 * rows),
        (Operation("allgather", ALL), rows), (Operation("broadcast", ALL, root_rank=0), rows),
        (Operation("alltoall", ALL, inputs=2), rows),
    ):  # fmt: skip
        call, given = call_of(operation), rows.copy()
        assert call.is_in_order
        assert (call.place is None) == call.overwrites
        (found,) = call.run([given])
        np.testing.assert_array_equal(found, expected)
        found, *_ = call.run_now([rows.copy()])
        np.testing.assert_array_equal(found, expected)
    assert call_of(Operation("barrier", ALL, inputs=0)).run([]) == []
    first, second = call_of(Operation("allgather", ALL, None, 2)).run([rows, rows[:1]])
    assert (first.shape, second.shape) == ((3, 2), (1, 2))


def test_a_weight_is_no_array_to_reduce(alone: Any) -> None:
    call = call_of(Operation("allreduce", ALL, None, 2, has_weight=True))
    assert call.operation.has_weight and not call.overwrites and not call.is_in_order
    assert host_call.results_of(call, [(3, 2), ()]) == [[3, 2]]
    values, weight = np.arange(6.0).reshape(3, 2), np.float32(5)
    (found,) = call.run([values, weight])
    np.testing.assert_array_equal(found, values)


def test_shapes_of_results_depend_on_the_place() -> None:
    def shapes(operation: Any, position: int, *given: Any) -> List[Any]:
        return host_call.results_of(HostCall(operation, SetPosition(position, 3), this_site()), given)

    assert shapes(Operation("allgather", ALL, None, 2), 1, (2, 5), (0,)) == [
        [6, 5],
        [0],
    ]
    parts = [shapes(Operation("reducescatter", TRIPLED), rank, (5, 2)) for rank in range(3)]
    assert parts == [[[2, 2]], [[2, 2]], [[1, 2]]]
    assert shapes(Operation("alltoall", ALL, inputs=2), 0, (6, 2)) == [[6, 2]]
    with pytest.raises(ShapeError, match="reducescatter needs an array with at least one dimension"):
        shapes(Operation("reducescatter", TRIPLED), 0, ())
    free = HostCall(Operation("allreduce", TRIPLED, None, 2), None, this_site())
    assert host_call.results_of(free, [(), (4,)]) == [[], [4]]


def test_a_program_for_other_ranks_is_refused(alone: Any) -> None:
    call = HostCall(Operation("allgather", ALL), SetPosition(1, 2), this_site())
    with pytest.raises(MismatchError, match=r"rank 1 of 2, .* Call jax.clear_caches\(\)") as raised:
        call.run([np.ones(2)])
    assert cause_of(RuntimeError(f"XLA: {raised.value}")) is raised.value


def test_a_call_needs_a_job() -> None:
    with pytest.raises(NotInitializedError):
        call_of(Operation("allreduce", TRIPLED))


def test_arrays_are_shared_with_jax_where_they_are_large_enough() -> None:
    import jax.numpy as jnp

    from ringcomm.jax import eager

    for shape in ((), (3,), (50, 60)):
        array = eager.aligned(shape, np.float32)
        assert array.shape == shape and array.dtype == np.float32
        assert array.ctypes.data % eager.ALIGNMENT == 0
        array[...] = 7
        result = eager.from_host(array, jnp.zeros(1))
        assert result.shape == shape and bool((result == 7).all())
        own = eager.to_host(result, copy=True)
        own += 1
        assert bool((result == 7).all())
        seen = eager.to_host(result, copy=False)
        assert seen.shape == shape and seen.flags.c_contiguous
    flags = eager.from_host(np.ones(5000, bool), None)
    assert flags.dtype == bool and flags.shape == (5000,)
