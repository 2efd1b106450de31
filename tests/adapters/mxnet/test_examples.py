"""The example for MXNet and the program on its page, run by ringrun."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import ROOT, run_python

if find_spec("mxnet") is None:
    pytest.skip("MXNet is not installed", allow_module_level=True)


def ringrun(*words: Any, **environment: str) -> str:
    """Run a job; what it printed."""
    return run_python("-m", "ringrun", *words, **environment)


@pytest.mark.parametrize("options", [(), ("--module",)])
def test_the_example(options: Any) -> None:
    output = ringrun("-np", 2, ROOT / "examples" / "mxnet_digits.py", "--epochs", 4, *options)
    (accuracy,) = re.findall(r"final validation accuracy ([\d.]+)", output)
    assert float(accuracy) > 0.9


def test_the_program_in_the_documentation(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "mxnet.md").read_text()
    (script,) = re.findall(r"```python\n(# mxnet_train.py\n.*?)```", page, re.DOTALL)
    (tmp_path / "mxnet_train.py").write_text(script)
    output = ringrun("-np", 2, tmp_path / "mxnet_train.py")
    assert float(output.split()[-1]) < 1e-2, output
