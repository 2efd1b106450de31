"""The module-level functions over their default context; one rank, so no socket is opened."""

from __future__ import annotations

import numpy as np
import pytest

import ringcomm as rc
from ringcomm import api
from ringcomm.config import Membership

ARGUMENTS = {
    "rank": (), "size": (), "local_rank": (), "local_size": (), "cross_rank": (), "cross_size": (),
    "is_homogeneous": (), "barrier": (), "broadcast_object": ("x",), "allgather_object": ("x",),
    **{
        name + suffix: (np.ones((2, 2)),)
        for name in ("allreduce", "reducescatter", "allgather", "broadcast", "alltoall")
        for suffix in ("", "_")
    },
}  # fmt: skip


@pytest.mark.parametrize("name", list(ARGUMENTS))
def test_before_init_every_function_says_what_to_do(name):
    assert not rc.is_initialized()
    with pytest.raises(rc.NotInitializedError, match=r"call ringcomm\.init\(\) first"):
        getattr(rc, name)(*ARGUMENTS[name])


@pytest.mark.parametrize("name", list(ARGUMENTS))
def test_all_functions_work_alone(alone, name):
    expected = {
        "rank": 0, "size": 1, "local_rank": 0, "local_size": 1, "cross_rank": 0, "cross_size": 1,
        "is_homogeneous": True, "barrier": None, "broadcast_object": "x", "allgather_object": ["x"],
    }  # fmt: skip
    result = getattr(rc, name)(*ARGUMENTS[name])
    if name in expected:
        assert result == expected[name]
    else:
        np.testing.assert_array_equal(result, np.ones((2, 2)))


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: rc.broadcast(1.0, root_rank="0"), "root_rank='0' is not a whole number"),
        (lambda: rc.broadcast_object(1, root_rank=0.0), "root_rank=0.0 is not a whole number"),
        (lambda: rc.broadcast(1.0, root_rank=1), "root_rank=1: this job has ranks 0 to 0"),
        (lambda: rc.allreduce(1.0, prescale_factor="a"), "are numbers, not 'a'"),
        (lambda: rc.reducescatter([1.0], postscale_factor=[]), r"are numbers, not \[\]"),
    ],
)
def test_arguments_of_the_wrong_type(alone, call, words):
    with pytest.raises(rc.Misuse, match=words):
        call()


def test_init_and_shutdown_may_be_repeated(alone):
    context = api.context()
    rc.init(Membership())
    assert api.context() is context
    rc.shutdown()
    rc.shutdown()
    assert not rc.is_initialized()
    rc.init(Membership())
    assert api.context() is not context


@pytest.mark.parametrize(
    "name, words",
    [
        ("all_reduce", "Did you mean rc.allreduce"),
        ("allreduc", "Did you mean rc.allreduce"), ("Average_", "Did you mean rc.Average"),
    ],
)  # fmt: skip
def test_an_unknown_name_of_the_package_suggests_the_one_that_is_meant(name, words):
    with pytest.raises(AttributeError, match=f"'ringcomm' has no attribute '{name}'.*{words}"):
        getattr(rc, name)
    assert not hasattr(rc, "_ipython_display_")


@pytest.mark.parametrize("call", [rc.synchronize, rc.poll])
def test_what_is_not_a_handle(call):
    for value in (3, None, "handle"):
        with pytest.raises(rc.Misuse, match="is not a handle: pass what a call"):
            call(value)


def test_an_average_of_integers_is_noted_once_per_line(caplog):
    with caplog.at_level("WARNING", "ringcomm"), rc.Context.start(rc.Membership(), rc.Settings()) as context:
        for _ in range(3):
            context.allreduce(np.array([1, 2]))
        context.allreduce(np.array([1.0, 2.0]))
        context.allreduce(np.array([1, 2]), rc.Sum)
        context.engine.allreduce([np.array([1])], rc.Average, "n").wait()
    assert len(caplog.messages) == 2
    assert all("test_api.py:" in text and "use op=Sum" in text for text in caplog.messages)
