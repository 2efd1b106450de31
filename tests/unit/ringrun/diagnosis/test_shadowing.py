"""Files beside a script that have the name of a module."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringrun.diagnosis.shadowing import shadow_hint


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
