from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Dict, Optional

import pytest

from ringrun.agent.checks import (
    check_result,
    find_problem,
)

HOW: Dict[str, Any] = {"code": 1, "signal": None, "sent": 0}
CONFIG = {"version": "0.1.0", "bytecode": "3.9"}
GOOD = {"python": "/p", "version": "3.9.1", "old": False, "numpy": "1.23.5", "ringcomm": "0.1.0"}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"old": True}, "old"),
        ({"missing": "numpy", "why": "ImportError: x"}, "missing"),
        ({"ringcomm": "0.2.0"}, "version"),
        ({"ringcomm": None}, None),
        ({"version": "3.10.13"}, "bytecode"),
        ({"version": "3.10.13", "missing": "numpy", "why": "ImportError: x"}, "bytecode"),
    ],
)
def test_judgement(changes: Dict[str, Any], problem: Optional[str]) -> None:
    output = b"some noise\n" + json.dumps({**GOOD, **changes}).encode()
    facts = check_result(output, "/p", CONFIG, HOW)
    assert facts.get("problem") == problem
    assert facts["found"]["python"] == "/p"


def test_what_is_not_there(tmp_path: Path) -> None:
    config: Dict[str, Any] = {"script": None, "python": True, "horovod": False, "timeline": ""}
    assert find_problem(config, sys.executable, str(tmp_path), None) is None
    nowhere = str(tmp_path / "no")
    assert find_problem(config, sys.executable, nowhere, None) == {"problem": "cwd", "path": nowhere}
    assert find_problem(config, "/no/python", str(tmp_path), None) == {
        "problem": "interpreter",
        "path": "/no/python",
    }
    config["python"] = False
    assert find_problem(config, "no-such", str(tmp_path), "/") == {"problem": "program", "path": "no-such"}
    config["script"] = "train.py"
    missing = {"problem": "script", "path": str(tmp_path / "train.py")}
    assert find_problem(config, sys.executable, str(tmp_path), None) == missing
    (tmp_path / "train.py").touch()
    assert find_problem(config, sys.executable, str(tmp_path), None) is None


@pytest.mark.parametrize("name", ["horovod.py", "horovod/__init__.py"])
def test_a_horovod_next_to_the_script_is_in_the_way(tmp_path: Path, name: str) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "horovod").mkdir()  # a folder of that name is no module
    config: Dict[str, Any] = {"script": "train.py", "python": True, "horovod": True, "timeline": ""}
    assert find_problem(config, sys.executable, str(tmp_path), None) is None
    (tmp_path / name).touch()
    wanted = {"problem": "shadow", "path": str(tmp_path / name)}
    assert find_problem(config, sys.executable, str(tmp_path), None) == wanted
    assert find_problem({**config, "horovod": False}, sys.executable, str(tmp_path), None) is None
