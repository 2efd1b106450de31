from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path
from typing import Any, List

import pytest

from ringcomm.errors import ConfigError
from ringrun.ship.wheels import Target, download_argv, fetch_wheels, platform_tags

BOARD = Target("3.8", "aarch64", "2.31")


def test_platform_tags_go_down_from_the_hosts_c_library() -> None:
    tags = platform_tags(BOARD)
    assert tags[0] == "manylinux_2_31_aarch64"
    assert "manylinux_2_17_aarch64" in tags and "manylinux2014_aarch64" in tags
    assert "manylinux_2_32_aarch64" not in tags


@pytest.mark.parametrize("glibc", ["", "3.1", "2.x"])
def test_another_c_library_is_refused(glibc: str) -> None:
    with pytest.raises(ConfigError, match=r"glibc only.*package manager"):
        platform_tags(BOARD._replace(glibc=glibc))


def test_pip_downloads_for_the_host_and_not_for_this_machine() -> None:
    argv = download_argv(BOARD, "/folder", ["numpy"])
    for option, value in [("--python-version", "3.8"), ("--implementation", "cp"), ("--dest", "/folder")]:
        assert argv[argv.index(option) + 1] == value
    assert "--only-binary=:all:" in argv and "--no-deps" in argv and argv[-1] == "numpy"


def test_wheels_of_an_earlier_job_are_used_again(tmp_path: Path) -> None:
    kept = tmp_path / "wheels-cp3.8-aarch64-glibc2.31"
    kept.mkdir()
    for name in ("numpy", "psutil"):
        with zipfile.ZipFile(kept / f"{name}-1.0-cp38-cp38-linux_aarch64.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", "")
            wheel.writestr(f"{name}/tests/test_it.py", "")
    package, lines = fetch_wheels(BOARD, tmp_path)
    assert package.name == "numpy 1.0, psutil 1.0"
    assert lines == [], "the digests are shown when they are downloaded"
    assert fetch_wheels(BOARD, tmp_path, ["psutil"])[0].name == "psutil 1.0"


def test_a_download_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no wheels of numpy for Python 2.9 on vax with glibc 2.31"):
        fetch_wheels(Target("2.9", "vax", "2.31"), tmp_path, ["numpy"])


def test_a_download_goes_to_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(argv: List[str], **_: object) -> Any:
        with zipfile.ZipFile(Path(argv[argv.index("--dest") + 1], "numpy-1.0-cp38-x.whl"), "w") as wheel:
            wheel.writestr("numpy/__init__.py", "")
        return subprocess.CompletedProcess(argv, 0, b"", b"")

    monkeypatch.setattr("ringrun.ship.wheels.subprocess.run", download)
    package, (line,) = fetch_wheels(BOARD, tmp_path, ["numpy"])
    assert package.name == "numpy 1.0"
    assert line.startswith("numpy-1.0-cp38-x.whl (sha256 ") and len(line.split("sha256 ")[1]) == 65
    (kept,) = tmp_path.iterdir()
    assert [file.name for file in kept.iterdir()] == ["numpy-1.0-cp38-x.whl"]


def test_a_download_that_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(argv: List[str], timeout: float, **_: object) -> Any:
        raise subprocess.TimeoutExpired(argv, timeout)

    monkeypatch.setattr("ringrun.ship.wheels.subprocess.run", download)
    with pytest.raises(ConfigError, match="pip did not download numpy and psutil within [0-9]+ s"):
        fetch_wheels(BOARD, tmp_path, ["numpy", "psutil"])
    (kept,) = tmp_path.iterdir()
    assert list(kept.iterdir()) == [], "the folder of the download is removed"
