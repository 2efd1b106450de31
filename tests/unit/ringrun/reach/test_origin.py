from __future__ import annotations

from pathlib import Path

import pytest

import ringcomm
from ringrun.job.launch import prepare
from ringrun.plan.hosts import HostSpec
from ringrun.plan.options import Options
from ringrun.reach import origin
from ringrun.reach.origin import _recorded_path, find_source, how_to_install, install_for
from ringrun.reach.ssh import Ssh, SshOptions


@pytest.mark.parametrize(
    "recorded", [None, "", "[]", "{}", '{"url": "https://x/y.whl"}', '{"url": "file:///gone"}']
)
def test_what_pip_has_noted_may_be_of_no_use(recorded: str) -> None:
    assert _recorded_path(recorded) is None


def test_the_wheel_that_pip_has_noted(tmp_path: Path) -> None:
    wheel = tmp_path / "a b.whl"
    wheel.touch()
    assert _recorded_path(f'{{"url": "{wheel.as_uri()}"}}') == wheel


def by_ssh(path: str, is_folder: bool) -> str:
    return Ssh(SshOptions()).copy_line(HostSpec("jetson1", "me"), path, is_folder)


def test_no_index_is_asked_for_ringcomm(tmp_path: Path) -> None:
    wheel = tmp_path / "ringcomm-1-py3-none-any.whl"
    for source in (tmp_path, wheel, None):
        for is_local in (False, True):
            text = how_to_install(source, "1", "/p", is_local, by_ssh)
            assert "/p -m pip install " in text and "pip install ringcomm" not in text
            assert ("me@jetson1:" in text) is not is_local
            assert source is None or str(source) in text


@pytest.mark.parametrize("is_recorded", [True, False])
def test_without_a_source_folder_the_record_of_pip_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_recorded: bool
) -> None:
    wheel = tmp_path / "ringcomm-1-py3-none-any.whl"
    wheel.touch()

    class Installed:
        def read_text(self, name: str) -> str:
            assert name == "direct_url.json"
            return f'{{"url": "{wheel.as_uri()}"}}'

    def distribution(name: str) -> Installed:
        assert name == "ringcomm"
        if not is_recorded:
            raise origin.PackageNotFoundError(name)
        return Installed()

    monkeypatch.setattr(ringcomm, "__file__", str(tmp_path / "site" / "ringcomm" / "__init__.py"))
    monkeypatch.setattr(origin, "distribution", distribution)
    assert find_source() == (wheel if is_recorded else None)


def test_instructions_for_a_host_of_a_job() -> None:
    (host,) = prepare(Options(np=1), ["true"], {}).hosts
    text = install_for(host)("/p")
    assert text == f"Install this machine's version: `/p -m pip install {find_source()}`."
