"""Hints where an error of another package does not say its cause."""

from __future__ import annotations

import pytest

from ringrun.diagnosis.hints import hint_of

KERAS_2 = [
    "ImportError: `keras.optimizers.legacy` is not supported in Keras 3. When using `tf.keras`, to continue",
    "AttributeError: 'Variable' object has no attribute 'ref'",
    "ValueError: Argument(s) not recognized: {'lr': 0.0001}",
    "ValueError: Unrecognized keyword arguments passed to BatchNormalization: {'fused': False}",
    "AttributeError: module 'keras._tf_keras.keras.backend' has no attribute 'set_session'",
    "    hvd.broadcast_variables(opt.variables(), 0)\nTypeError: 'list' object is not callable",
    "TypeError: in user code:\n\n    opt.variables()\n\n    TypeError: 'list' object is not callable",
    "TypeError: Trainer.compile() got an unexpected keyword argument 'experimental_run_tf_function'",
]


@pytest.mark.parametrize("error", KERAS_2)
def test_programs_for_keras_2_are_recognized(error: str) -> None:
    assert "TF_USE_LEGACY_KERAS=1" in hint_of("Traceback (most recent call last):\n" + error)


@pytest.mark.parametrize(
    ("function", "argument", "word"),
    [("allreduce", "average", "op=rc.Sum"), ("grouped_allreduce_", "group", "process_set="),
     ("Context.broadcast", "src", "root_rank"), ("allgather", "async_op", "handle.wait()")],
)  # fmt: skip
def test_arguments_that_others_have(function: str, argument: str, word: str) -> None:
    assert word in hint_of(f"TypeError: {function}() got an unexpected keyword argument '{argument}'")
    assert hint_of(f"TypeError: {function}() got an unexpected keyword argument 'colour'") == ""
    assert hint_of(f"TypeError: train() got an unexpected keyword argument '{argument}'") == ""


@pytest.mark.parametrize(
    ("error", "remedy"),
    [("AttributeError: module 'tensorflow' has no attribute 'ConfigProto'", "tensorflow.compat.v1"),
     ("ImportError: cannot import name 'HorovodStrategy' from 'lightning'", "ddp_ringcomm"),
     ("AssertionError: Unknown c10d backend type RINGCOMM", "import ringcomm.torch.distributed"),
     ("RuntimeError: Expected to mark a variable ready only once.", "use_reentrant=False"),
     ("AssertionError: computed more than backward_passes_per_step times", "use_reentrant=False")],
)  # fmt: skip
def test_errors_of_public_programs(error: str, remedy: str) -> None:
    assert remedy in hint_of("Traceback (most recent call last):\n" + error)


def test_other_errors_have_no_hint() -> None:
    assert hint_of("AttributeError: 'Tensor' object has no attribute 'reference'") == ""
