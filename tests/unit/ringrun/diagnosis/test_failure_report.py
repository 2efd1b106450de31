"""The report of a failed job: its box, tracebacks on the stderr of ranks, and remedies."""

from __future__ import annotations

from pathlib import Path
from typing import List, Optional

import pytest

import ringcomm
from ringrun.diagnosis.failure_report import (
    direct_cause,
    failure_box,
    hint_of,
    last_traceback,
    local_file_hint,
    shadow_hint,
    signal_hint,
    without_inner_frames,
)
from ringrun.diagnosis.first_failure import Complaint, Exit, FirstFailure, ranks_text
from ringrun.job.launch import prepare
from ringrun.plan.options import Options

HOSTS = {0: "pc", 1: "pc", 2: "jetson1", 3: "jetson1"}
TRACE = [
    "Traceback (most recent call last):", '  File "x.py", line 1, in <module>', "    f()", "ValueError: x",
    "more",
]


def test_ranks() -> None:
    found = [ranks_text(ranks) for ranks in ([2], [0, 1], [3, 0, 1, 2, 7], [0, 2, 4])]
    assert found == ["rank 2", "ranks 0, 1", "ranks 0-3, 7", "ranks 0, 2, 4"]


def test_the_box() -> None:
    failure = FirstFailure()
    failure.exited(Exit(2, 3, None))
    failure.complained(Complaint(None, 2, "rank 2 was lost"))
    for rank in (0, 1, 3):
        failure.exited(Exit(rank, 1, None))
    text = failure_box(
        failure, HOSTS, ["pc", "jetson1"], {2: ["log", *TRACE], 0: [*TRACE[:3], "KeyError: 1"]}
    )
    assert text.splitlines() == [
        "╭─ ringrun: rank 2 on jetson1 failed first: exit code 3", *[f"│ {line}" for line in TRACE], "│",
        "│ Ranks 0, 1, 3 stopped because of it.", "╰─ exit code 3",
    ]


def mismatch(rank: int) -> List[str]:
    """Return what a rank wrote that is told of a mismatch, wherever in its program it was."""
    error = "ringcomm.errors.MismatchError: Mismatched shapes for 'a': rank 0: x; ranks 1-3: y."
    return [TRACE[0], f"  File x{rank}", error, "and more" if rank else ""]


def test_a_mismatch_is_told_once() -> None:
    failure = FirstFailure()
    failure.complained(Complaint(None, 1, "rank 1 was lost: uncaught MismatchError: …"))
    for rank in (1, 0, 2):
        failure.exited(Exit(rank, 1, None))
    failure.exited(Exit(3, None, 15, sent=15))
    read: List[bool] = []

    def diagnosis(names_calls: bool) -> str:
        read.append(names_calls)
        return "Rank 3 …"

    tails = {rank: mismatch(rank) for rank in range(3)}
    text = failure_box(failure, HOSTS, ["pc", "jetson1"], tails, diagnosis)
    assert text.splitlines() == [
        "╭─ ringrun: the ranks do not make the same calls", *[f"│ {line}" for line in mismatch(1)], "│",
        "│ Ranks 0, 2 failed with the same error.", "│ Rank 3 stopped because of it.", "│", "│ Rank 3 …",
        "╰─ exit code 1",
    ]
    assert read == [True]


def test_ranks_with_the_same_bug_are_no_victims_of_each_other() -> None:
    failure = FirstFailure()
    failure.complained(Complaint(None, 1, "rank 1 was lost: uncaught ValueError: …"))
    for rank in (1, 0, 2, 3):
        failure.exited(Exit(rank, 1, None))
    tails = {
        0: ["noise", *TRACE[:3], "ValueError: another text"], 1: TRACE[:4],
        2: [TRACE[0], "  File x", "ringcomm.errors.PeerLostError: rank 1", "", "The above …", "", *TRACE[:4]],
        3: [TRACE[0], "  File y", "ValueError: x"],
    }  # fmt: skip
    lines = failure_box(failure, HOSTS, ["pc", "jetson1"], tails).splitlines()
    assert lines[-3:-1] == ["│ Rank 0 failed with the same error.", "│ Ranks 2, 3 stopped because of it."]


def test_a_module_that_one_host_lacks_is_told_with_its_interpreter() -> None:
    failure = FirstFailure()
    failure.exited(Exit(2, 1, None))
    pythons = {"pc": "/here", "jetson1": "/there/python"}
    lines = [*TRACE[:3], "ModuleNotFoundError: No module named 'torch'"]
    text = failure_box(failure, HOSTS, ["pc", "jetson1"], {2: lines}, pythons=pythons)
    assert "On jetson1 ranks run /there/python, which finds no module `torch`." in text
    assert "`/there/python -m pip install …`" in text and "--python jetson1=PATH" in text
    assert "finds no module" not in failure_box(failure, HOSTS, ["pc", "jetson1"], {2: lines})
    error = "AttributeError: 'Variable' object has no attribute 'ref'"
    other = failure_box(failure, HOSTS, ["pc", "jetson1"], {2: [*TRACE[:-1], error]}, pythons=pythons)
    assert "finds no module" not in other and other.index(error) < other.index("-x TF_USE_LEGACY_KERAS=1")
    lines[-1] = "ModuleNotFoundError: No module named 'horovod'"
    text = failure_box(failure, HOSTS, ["pc", "jetson1"], {2: lines}, pythons=pythons)
    assert "unchanged with --horovod" in text and "pip install" not in text


@pytest.mark.parametrize(("number", "word"), [(9, "memory"), (11, "compiled code"), (15, "")])
def test_signal_hints(number: int, word: str) -> None:
    assert word in signal_hint(Exit(0, None, number))
    assert signal_hint(Exit(0, 1, None)) == ""
    assert signal_hint(Exit(0, None, number, sent=number)) == ""


ERROR = ["ringcomm.errors.MismatchError: The ranks do not make the same call.", "rank 0: a", "  indented"]


def test_the_last_traceback_is_found() -> None:
    lines = [
        *TRACE, "", "log line", "Traceback (most recent call last):", "  File", "KeyError: 'y'", "",
        "Exception ignored in: <function f>", "Traceback (most recent call last):",
        "TypeError: at the end of Python",
    ]
    assert last_traceback(lines) == "Traceback (most recent call last):\n  File\nKeyError: 'y'"
    assert last_traceback(TRACE) == "\n".join(TRACE)
    assert last_traceback(["nothing"]) == ""


def test_a_long_traceback_is_shortened() -> None:
    text = last_traceback([TRACE[0], *["  File"] * 1000, "RecursionError"])
    assert len(text.splitlines()) < 50
    assert "left out" in text and text.endswith("RecursionError")


def test_an_error_goes_on_after_an_empty_line() -> None:
    error = [
        "TypeError: in user code:", "", '    File "train.py", line 12, in step', "", "    TypeError: really",
    ]
    assert last_traceback([*TRACE, "", *TRACE[:3], *error, ""]) == "\n".join([*TRACE[:3], *error])
    long = last_traceback(
        [*TRACE[:3], error[0], *["", "  more"] * 500, "Node: 'MatMul'", "shapes do not match"]
    )
    assert error[0] in long and long.endswith("shapes do not match") and len(long.splitlines()) < 60


def test_the_place_of_a_cause_is_the_programs_line() -> None:
    caused = "The above exception was the direct cause of the following exception:"
    thread = ['  File "/usr/lib/python3.11/threading.py", line 982, in run', "    self._target()"]
    first = [TRACE[0], *frame("train.py"), *thread, "KeyError: 1", "", "    more"]
    text = direct_cause([*first, "", caused, "", TRACE[0], *frame("x.py"), "ValueError: 2"])
    assert text.startswith("KeyError: 1\n") and "more" in text
    assert text.endswith('File "train.py", line 1, in f') and "threading.py" not in text


def frame(path: str) -> List[str]:
    return [f'  File "{path}", line 1, in f', "    call()", "    ^^^^^^"]


def test_frames_inside_ringcomm_are_left_out() -> None:
    inner = str(Path(ringcomm.__file__).parent / "api.py")
    sent = "/tmp/ringrun-0/ringcomm/collective/runner.py"  # of the package that ringrun has sent to a host
    user = [frame("train.py"), frame("/home/me/ringcomm/train.py"), frame("/home/me/ringcomm/examples/x.py")]
    calls = [user[0], frame(inner), user[1], user[2], frame(sent), frame("C:\\ringcomm\\errors.py")]
    lines = [TRACE[0], *(line for call in calls for line in call), *ERROR]
    assert without_inner_frames(lines) == [TRACE[0], *(line for call in user for line in call), *ERROR]


KERAS_2 = "TF_USE_LEGACY_KERAS=1"


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("ImportError: `keras.optimizers.legacy` is not supported in Keras 3. Use", KERAS_2),
        ("AttributeError: 'Variable' object has no attribute 'ref'", KERAS_2),
        ("ValueError: Argument(s) not recognized: {'lr': 0.0001}", KERAS_2),
        ("Unrecognized keyword arguments passed to BatchNormalization: {'fused': False}", KERAS_2),
        ("AttributeError: module 'keras._tf_keras.keras.backend' has no attribute 'set_session'", KERAS_2),
        ("    broadcast(opt.variables(), 0)\nTypeError: 'list' object is not callable", KERAS_2),
        ("in user code:\n\n    opt.variables()\n\n    TypeError: 'list' object is not callable", KERAS_2),
        ("Trainer.compile() got an unexpected keyword argument 'experimental_run_tf_function'", KERAS_2),
        ("AttributeError: module 'tensorflow' has no attribute 'ConfigProto'", "tensorflow.compat.v1"),
        ("ImportError: cannot import name 'HorovodStrategy' from 'lightning'", "ddp_ringcomm"),
        ("AssertionError: Unknown c10d backend type RINGCOMM", "import ringcomm.torch.distributed"),
        ("RuntimeError: Expected to mark a variable ready only once.", "use_reentrant=False"),
        ("AssertionError: computed more than backward_passes_per_step times", "use_reentrant=False"),
    ],
)
def test_remedies_for_errors_of_public_programs(error: str, remedy: str) -> None:
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
