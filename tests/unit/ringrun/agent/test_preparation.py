"""The steps before a host's ranks start, and what the launcher is asked for at each."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Dict

import pytest

from ringrun.agent import shipped
from ringrun.agent.checks import CHECK, Preparation
from ringrun.ship.package import Package
from ringrun.ship.source_tree import SourceTree

FOUND = {"python": "/p", "version": "3.9.1", "old": False, "numpy": "2.0", "ringcomm": "1", "ringrun": "1",
         "ringrun_at": "/site/ringrun/__init__.py"}  # fmt: skip
HOW = {"code": 0, "signal": None, "sent": 0}


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "SHARED_PLACES", ())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TMPDIR", raising=False)


def preparation(cwd: Path, program: str = sys.executable, **changes: Any) -> Preparation:
    config: Dict[str, Any] = {
        "folder": "job", "code": [], "code_at": ".", "package": "", "provision": False, "script": None,
        "python": True, "horovod": False, "writes": [], "bytecode": "", "version": "1", "fetch": [],
    }  # fmt: skip
    limits = {"threads": 1}
    return Preparation({**config, **changes}, {"PATH": "/usr/bin:/bin"}, program, str(cwd), limits)


def test_a_python_program_is_tried_before_the_host_is_ready(tmp_path: Path) -> None:
    steps = preparation(tmp_path)
    name, facts = steps.use_package()
    assert name == CHECK and facts["argv"][0] == sys.executable and facts["argv"][-1] == "ringcomm"
    name, facts = steps.checked(json.dumps(FOUND).encode(), HOW)
    assert name == "ready" and facts["limits"] == {"threads": 1} and facts["found"] == FOUND
    assert 0 < facts["port"] < 65536
    assert list(steps.fetched()) == []


def test_a_package_is_asked_for_and_used(tmp_path: Path) -> None:
    package = Package("numpy 2.0", {"numpy/__init__.py": b""})
    steps = preparation(tmp_path, provision=True)
    assert steps.use_package()[0] == CHECK
    assert steps.use(package.digest) == ("lacks", {})
    assert steps.use_package(package.archive)[0] == CHECK
    assert steps._env["PYTHONPATH"].endswith(package.digest)
    name, _ = steps.checked(json.dumps({**FOUND, "missing": "psutil", "why": ""}).encode(), HOW)
    assert name == "problem", "it is asked for once"
    name, facts = steps.use_package(b"damaged")
    assert (name, facts["problem"]) == ("problem", "package")


def test_the_ranks_run_in_the_copy_of_the_code(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    (root / "sub").mkdir(parents=True)
    (root / "sub" / "train.py").write_text("print(1)")
    tree = SourceTree(root)
    changes = {"code": tree.files, "code_at": "sub", "script": "train.py", "fetch": ["sub/*"]}
    steps = preparation(tmp_path / "elsewhere", **changes)
    name, facts = steps.use_package()
    assert name == "lacks" and len(facts["files"]) == 1
    archive = Package("files", tree.contents(facts["files"])).archive
    assert steps.place_code(archive)[0] == CHECK
    assert steps.folder.path is not None and steps.cwd == f"{steps.folder.path}/sub"
    assert (Path(steps.cwd) / "train.py").read_text() == "print(1)"
    (Path(steps.cwd) / "out.txt").write_text("result")
    assert b"result" in b"".join(steps.fetched())
    name, facts = preparation(tmp_path, code=tree.files, folder="other").place_code(b"damaged")
    assert (name, facts["problem"], facts["path"]) == ("problem", "package", "--ship")
