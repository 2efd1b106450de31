"""The ways from a program to the host with the installed JAX; names what is missing if JAX has changed."""

from __future__ import annotations

import importlib
import logging
import threading
from typing import Any

import pytest

jax = pytest.importorskip("jax")

from ringcomm.errors import NotOfferedError  # noqa: E402
from ringcomm.jax import mechanism, requirement  # noqa: E402


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["buffers", "io_callbacks"])
def test_it_works_with_the_newest_jax(name: str) -> None:
    """Fails with the name that a new JAX has moved. Users' programs run on: `choose` takes the other way."""
    mechanism.in_own_thread(importlib.import_module(f"ringcomm.jax.{name}"))


def test_a_version_of_jax_that_is_too_old_is_named() -> None:
    for version in ("0.5.3", "0.6.0", "0.4.38.dev20250101"):
        with pytest.raises(ImportError, match=f"requires JAX 0.6.1 or newer, and JAX {version} is installed"):
            requirement.check(version)
    for version in ("0.6.1", "0.10.2", "1.0", jax.__version__):
        requirement.check(version)


def moved(*args: Any) -> Any:
    raise AttributeError("module 'jax._src.ffi' has no attribute 'ffi_lowering'")


def test_copies_are_used_where_a_private_name_has_moved(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from ringcomm.jax import buffers, io_callbacks

    monkeypatch.setattr(buffers, "lower", moved)
    with caplog.at_level(logging.WARNING, "ringcomm.jax"):
        assert mechanism.choose(["buffers", "io_callbacks"]) is io_callbacks
    (record,) = caplog.records
    assert "no attribute 'ffi_lowering'" in record.getMessage() and jax.__version__ in record.getMessage()


def test_calls_in_a_wrong_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from ringcomm.jax import buffers

    monkeypatch.setattr(mechanism._Trial, "overwrite", lambda self, arrays: self.seen.append(0.0))
    with pytest.raises(AssertionError, match="calls with"):
        mechanism.in_own_thread(buffers)


def test_a_trial_that_does_not_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(mechanism, "TRIAL_S", 0.05)
    monkeypatch.setattr(mechanism, "trial", lambda module: ended.wait(100))
    with pytest.raises(TimeoutError, match="the trial did not end within 0.05 s"):
        mechanism.in_own_thread(None)
    ended.set()


def test_both_reasons_are_given_where_neither_works(monkeypatch: pytest.MonkeyPatch) -> None:
    from ringcomm.jax import buffers, io_callbacks

    for module in (buffers, io_callbacks):
        monkeypatch.setattr(module, "lower", moved)
    with pytest.raises(NotOfferedError, match="buffers: AttributeError.*io_callbacks: AttributeError"):
        mechanism.choose(["buffers", "io_callbacks"])
