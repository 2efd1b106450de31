"""``run_function``: a function as a job, with its results, errors and output."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from ringcomm.errors import RingcommError
from ringrun.function import RemoteError
from ringrun.function import run as run_function
from ringrun.show.console import Console


class Kept(Console):
    """A console that remembers."""

    def __init__(self) -> None:
        self.text = {1: b"", 2: b""}

    def write(self, stream: int, data: bytes) -> None:
        self.text[stream] += data


def describe(*args: Any, **kwargs: Any) -> Any:
    import os

    print("called")
    return os.environ["RINGCOMM_SLOT"], args, kwargs


def test_results_come_in_rank_order() -> None:
    console = Kept()
    results = run_function(describe, (1, "two"), {"three": [3]}, np=3, console=console)
    assert results == [(f"0:{rank}", (1, "two"), {"three": [3]}) for rank in range(3)]
    assert sorted(console.text[1].splitlines()) == [b"[localhost:%d] called" % rank for rank in range(3)]


def fail_on_rank_1() -> None:
    import os
    import time

    if os.environ["RINGCOMM_SLOT"] == "0:1":
        raise KeyError("no such thing")
    time.sleep(60)


def test_modules_are_found_where_the_caller_finds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though neither the working directory nor PYTHONPATH leads there."""
    (tmp_path / "beside_the_caller.py").write_text("def answer():\n    return 42\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    module = importlib.import_module("beside_the_caller")
    monkeypatch.delitem(sys.modules, "beside_the_caller")
    monkeypatch.setitem(sys.modules, "beside_the_caller", module)  # and it is gone after the test
    assert run_function(module.answer, np=1, console=Kept()) == [42]


def test_an_exception_comes_back_with_rank_host_and_traceback() -> None:
    with pytest.raises(RemoteError, match="rank 1 on localhost: KeyError: 'no such thing'") as caught:
        run_function(fail_on_rank_1, np=2, console=Kept())
    assert isinstance(caught.value, RingcommError)
    assert (caught.value.rank, caught.value.host) == (1, "localhost")
    assert "in fail_on_rank_1" in caught.value.traceback_text
    assert "ringrun/" not in caught.value.traceback_text
    assert isinstance(caught.value.__cause__, KeyError)


def another_python() -> str:
    """An interpreter on this machine of another minor version that ringcomm works with, or ""."""
    places = [shutil.which(f"python3.{minor}") or "" for minor in range(8, 15)]
    places += [str(path) for path in sorted(Path("~/.pyenv/versions").expanduser().glob("3.*/bin/python"))]
    show = "import sys; print('{} {}'.format(*sys.version_info))"
    for place in filter(None, places):
        found = subprocess.run(
            [place, "-c", show], capture_output=True, text=True, check=False
        ).stdout.split()
        if found and int(found[1]) >= 8 and int(found[1]) != sys.version_info[1]:
            return place
    return ""


def test_another_minor_version_of_python_is_refused_before_the_start() -> None:
    other = another_python()
    if not other:
        pytest.skip("there is no other version of Python on this machine")
    console = Kept()
    with pytest.raises(RemoteError) as caught:
        run_function(lambda: 1, np=2, python=other, console=console)
    own = "{}.{}".format(*sys.version_info)
    for words in ("the job did not start", other, f"Python {own} here", "same minor version", "--python"):
        assert words in str(caught.value)
    assert caught.value.rank is None and not console.text[1]


class MakesAFolder:
    """Runs code when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def write_by_oneself(data: bytes) -> None:
    import os
    import sys

    os.write(int(sys.argv[2]), data)
    os._exit(0)


def test_a_result_without_the_ranks_signature_is_not_unpickled(tmp_path: Path) -> None:
    trap = tmp_path / "run"
    forged = cloudpickle.dumps({"ok": True, "value": MakesAFolder(str(trap))})
    with pytest.raises(RemoteError, match="rank 0 on localhost has no valid signature of that rank"):
        run_function(write_by_oneself, (forged,), np=1, console=Kept())
    assert not trap.exists()
