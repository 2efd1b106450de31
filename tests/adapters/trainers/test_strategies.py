"""``ringcomm.lightning`` without Lightning; ``test_trainers.py`` runs it with both distributions."""

from __future__ import annotations

import sys
from importlib import import_module, util

import pytest

pytest.importorskip("torch")


def test_without_lightning_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ringcomm.lightning", "lightning", "pytorch_lightning"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(util, "find_spec", lambda package: None)
    with pytest.raises(ImportError, match="not installed here.* -m pip install lightning"):
        import_module("ringcomm.lightning")
