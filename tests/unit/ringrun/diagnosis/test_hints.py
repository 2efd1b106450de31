"""Remedies for errors that do not name their cause."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

import pytest

from ringrun.diagnosis.failure_report import hint_of, local_file_hint, shadow_hint
from ringrun.job.launch import prepare
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
    ("error", "remedy"),
    [("AttributeError: module 'tensorflow' has no attribute 'ConfigProto'", "tensorflow.compat.v1"),
     ("ImportError: cannot import name 'HorovodStrategy' from 'lightning'", "ddp_ringcomm"),
     ("AssertionError: Unknown c10d backend type RINGCOMM", "import ringcomm.torch.distributed"),
     ("RuntimeError: Expected to mark a variable ready only once.", "use_reentrant=False"),
     ("AssertionError: computed more than backward_passes_per_step times", "use_reentrant=False")],
)  # fmt: skip
def test_errors_of_public_programs(error: str, remedy: str) -> None:
    assert remedy in hint_of("Traceback (most recent call last):\n" + error)


# ---- files that only the launching machine has ----------------------------------------------------

HEAD = ["Traceback (most recent call last):", '  File "train.py", line 3, in <module>']


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ("FileNotFoundError: [Errno 2] No such file or directory: '{folder}/data/x.npy'", True),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'train.py'", None),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'data/x.npy'", True),
        ("FileNotFoundError: data/x.npy not found.", True),
        ("tensorflow.errors.NotFoundError: {{node R}} data/x.npy; No such file or directory [Op:Read]", True),
        ("OSError: Unable to open file (unable to open file: name = 'data/x.npy', errno = 2)", True),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'data/none'", False),
        ("ValueError: data/x.npy has another shape", False),
    ],
)
def test_a_file_that_only_this_machine_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str, told: Optional[bool]
) -> None:
    """None: the file is sent with --ship."""
    (tmp_path / "data").mkdir()
    for name, text in {"train.py": "", "data/x.npy": "", ".ringignore": "data\n"}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    for ship in (None, "."):
        job = prepare(Options(hosts="localhost,me@b", ship=ship), ["train.py"])
        folder = f"/x/jobs/{job.folder}-1" if ship else str(tmp_path)
        lines = [*HEAD, error.replace("{folder}", folder)]
        hint = local_file_hint(job, job.hosts[1], lines)
        if told is None:
            assert bool(hint) is (ship is None)
            continue
        assert (f"{tmp_path}/data/x.npy is on this machine, but not on b" in hint) is told
        assert (f"rsync -a {tmp_path}/data/x.npy me@b:{tmp_path}/data/" in hint) is told
        assert ("git or .ringignore leaves it out" in hint) is (told and ship is not None)
        assert local_file_hint(job, job.hosts[0], lines) == "", "the rank is on this machine"


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
