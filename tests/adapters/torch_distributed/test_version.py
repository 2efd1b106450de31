"""What the backend says to versions of PyTorch that it was not made for."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest

pytest.importorskip("torch")


def test_versions():
    from ringcomm.torch.distributed._version import check

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for version in ("2.4.0", "2.10.1+cu128", "2.13.0+cpu", "2.5.0a0+git1234567"):
            check(version)
    for version in ("1.13.1", "2.3.1+cpu"):
        with pytest.raises(ImportError, match=r"needs PyTorch 2\.4 or later; this is .*pip install -U torch"):
            check(version)
    with pytest.warns(RuntimeWarning, match=r"PyTorch 2\.15\.0 is newer .*2\.13"):
        check("2.15.0")


def test_an_old_pytorch_gets_this_error_first():
    program = (
        "import torch\n"
        "torch.__version__ = '2.3.1'\n"
        "del torch.distributed.Backend\n"  # what an old version lacks
        "import ringcomm.torch.distributed\n"
    )
    done = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert "ImportError: ringcomm.torch.distributed needs PyTorch 2.4" in done.stderr


@pytest.mark.parametrize(
    ("env", "warns"),
    [({}, True), ({"RANK": "0"}, True), ({"RANK": "1"}, False), ({"RINGCOMM_RANK": "2"}, False)],
)
def test_a_newer_version_is_pointed_out_on_rank_0_alone(monkeypatch, recwarn, env, warns):
    from ringcomm.torch.distributed._version import check

    for name in ("RANK", "RINGCOMM_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        check("99.1.0")
    assert bool(recwarn) is warns
