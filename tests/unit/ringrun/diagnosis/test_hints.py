"""Remedies for errors that do not name their cause."""

from __future__ import annotations

from pathlib import Path
from typing import List

import pytest

from ringrun.diagnosis.first_failure import Exit, FirstFailure
from ringrun.diagnosis.hints import hint_of, local_file_hint, shadow_hint
from ringrun.job.launch import prepare
from ringrun.job.outcome import ended
from ringrun.plan.job import Job
from ringrun.plan.options import Options

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


# ---- files that only the launching machine has ----------------------------------------------------

HEAD = ["Traceback (most recent call last):", '  File "train.py", line 3, in <module>']


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a program with data that is not sent."""
    (tmp_path / "data").mkdir()
    for name, text in {"train.py": "", "data/x.npy": "", ".ringignore": "data\n"}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    return tmp_path


def job_of(ship: bool) -> Job:
    return prepare(Options(hosts="localhost,me@b", ship="." if ship else None), ["train.py"])


@pytest.mark.parametrize("ship", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        "FileNotFoundError: [Errno 2] No such file or directory: 'data/x.npy'",
        "FileNotFoundError: data/x.npy not found.",
        "tensorflow.errors.NotFoundError: {{node R}} data/x.npy; No such file or directory [Op:ReadFile]",
        "OSError: Unable to open file (unable to open file: name = 'data/x.npy', errno = 2)",
        "FileNotFoundError: [Errno 2] No such file or directory: '{folder}/data/x.npy'",
        "FileNotFoundError: [Errno 2] No such file or directory: '{copy}/data/x.npy'",
    ],
)
def test_a_file_that_only_this_machine_has(folder: Path, error: str, ship: bool) -> None:
    job = job_of(ship)
    if "{copy}" in error and not ship:
        pytest.skip("there is no copy")
    error = error.replace("{folder}", str(folder)).replace("{copy}", f"/x/jobs/{job.folder}-1")
    lines = [*HEAD, error]
    hint = local_file_hint(job, job.hosts[1], lines)
    assert f"{folder}/data/x.npy is on this machine, but not on b" in hint
    assert f"rsync -a {folder}/data/x.npy me@b:{folder}/data/" in hint
    assert ("git or .ringignore leaves it out" in hint) is ship
    assert local_file_hint(job, job.hosts[0], lines) == "", "the rank is on this machine"
    failure = FirstFailure()
    failure.exited(Exit(1, 1, None))
    assert hint.split(":")[0] in ended(job, failure, "", 0, {1: lines}).report


@pytest.mark.parametrize(
    "lines",
    [
        [*HEAD, "FileNotFoundError: [Errno 2] No such file or directory: 'data/none'"],
        [*HEAD, "FileNotFoundError: [Errno 2] No such file or directory: 'train.py'"],
        [*HEAD, "ValueError: data/x.npy has another shape"],
        [],
    ],
)
def test_errors_about_other_files_have_no_hint(folder: Path, lines: List[str]) -> None:
    job = job_of(ship=True)
    assert local_file_hint(job, job.hosts[1], lines) == ""


# ---- files with the name of a module -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("numpy.py", "AttributeError: module 'numpy' has no attribute 'ndarray'"),
        ("numpy.py", "AttributeError: partially initialized module 'numpy' has no attribute 'float32' (most"),
        ("numpy/__init__.py", "AttributeError: module 'numpy.linalg' has no attribute 'norm'"),
        ("email.py", "ModuleNotFoundError: No module named 'email.utils'; 'email' is not a package"),
        ("socket.py", "ImportError: cannot import name 'socket' from 'socket' (/home/me/socket.py)"),
    ],
)
def test_the_error_names_the_file_that_shadows(tmp_path: Path, name: str, text: str) -> None:
    assert shadow_hint(text, tmp_path) == ""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    shown = path.parent if path.name == "__init__.py" else path
    assert shadow_hint(text, tmp_path).startswith(f"{shown} has the name of the module {shown.stem}, ")


def test_a_module_of_the_users_own_shadows_nothing(tmp_path: Path) -> None:
    (tmp_path / "my_helper.py").touch()
    assert shadow_hint("AttributeError: module 'my_helper' has no attribute 'f'", tmp_path) == ""
    assert shadow_hint("ValueError: numpy", tmp_path) == ""
