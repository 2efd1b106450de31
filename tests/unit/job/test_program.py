"""Whether all hosts run the same files."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace

import pytest

from ringcomm.collective.runner import Runner
from ringcomm.config import Settings
from ringcomm.job import preparation as program
from ringcomm.job.preparation import differences_text, own_files
from ringcomm.transport.memory import memory_fabrics

HOSTS = ["pc", "jetson1", "jetson1", "jetson2"]


@pytest.fixture
def load(tmp_path, monkeypatch):
    """`load(name, path, text)` makes a file below a folder, and a module of it that has been imported."""

    def load(name, path, text="pass", spec=None):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        module = ModuleType(name)
        module.__file__ = str(file)
        module.__spec__ = spec
        monkeypatch.setitem(sys.modules, name, module)

    return load


def test_the_script_and_what_it_imports_from_its_folder(load, tmp_path):
    load("__main__", "project/train.py")
    load("model", "project/model.py")
    load("package.part", "project/package/part.py")
    load("elsewhere", "other/elsewhere.py")
    load("numpy.fake", "project/.venv/lib/python3.11/site-packages/numpy/fake.py")
    load("ringcomm.fake", "project/ringcomm/fake.py")
    found = own_files()
    assert sorted(found) == ["model.py", "package/part.py", "train.py"]
    load("model", "project/model.py", "other")
    again = own_files()
    assert [name for name in found if again[name] != found[name]] == ["model.py"]


def test_no_script(load, monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    assert own_files() == {}
    load("__main__", "lib/python3.11/site-packages/tool/__main__.py")
    assert own_files() == {}
    load("__main__", "project/ringrun/agent/worker.py", spec=SimpleNamespace(name="ringrun.agent.worker"))
    assert own_files() == {}


def test_hosts_and_files_are_named():
    same = {"train.py": "a", "model.py": "b"}
    assert differences_text([same] * 4, HOSTS) == ""
    other = {**same, "train.py": "x"}
    text = differences_text([same, other, other, same], HOSTS)
    assert "run the same program: train.py on jetson1 (ranks 1, 2) is not that on pc (rank 0), jets" in text
    text = differences_text([same, same, same, {"train.py": "x", "model.py": "y"}], HOSTS)
    assert "model.py on jetson2 (rank 3) is not that on pc (rank 0), jetson1 (ranks 1, 2); train" in text


@pytest.mark.parametrize(
    ("programs", "expected"),
    [
        ([{"a.py": "1"}, {"a.py": "1"}], ""),
        ([{"a.py": "1"}, {}], ""),  # a notebook has no files
        ([{"a.py": "1"}, {"a.py": "2"}], "a.py"),
    ],
)
def test_ranks_exchange_what_they_run_if_it_differs(monkeypatch, programs, expected):
    mine = threading.local()
    monkeypatch.setattr(program, "own_files", lambda: mine.files)

    def work(fabric):
        mine.files = programs[fabric.rank]
        return program.compare_programs(Runner(fabric, Settings(timeout_s=20.0)), HOSTS[:2])

    with ThreadPoolExecutor(2) as pool:
        first, other = pool.map(work, memory_fabrics(2))
    assert first == other and (expected in first if expected else first == "")
