from __future__ import annotations

import hashlib
import json
import os
import subprocess
import zipfile
from pathlib import Path
from typing import Any, List

import pytest

from ringcomm.errors import ConfigError
from ringrun.agent import shipped
from ringrun.ship.wheels import (
    DIGESTS,
    Target,
    download_argv,
    fetch_wheels,
    platform_tags,
    trusted_cache,
)

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
        (kept / f"{name}-1.0-cp38-cp38-linux_aarch64.whl").chmod(0o600)
    digests = {wheel.name: hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in kept.iterdir()}
    (kept / DIGESTS).write_text(json.dumps(digests))
    (kept / DIGESTS).chmod(0o600)
    package, lines = fetch_wheels(BOARD, tmp_path)
    assert package.name == "numpy 1.0, psutil 1.0"
    assert lines == [], "the digests are shown when they are downloaded"
    assert fetch_wheels(BOARD, tmp_path, ["psutil"])[0].name == "psutil 1.0"


@pytest.mark.parametrize("change", ["content", "mode", "link", "owner", "no digests"])
def test_wheels_that_are_not_as_they_were_are_downloaded_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    monkeypatch.setattr("ringrun.ship.wheels.subprocess.run", download)
    package, _ = fetch_wheels(BOARD, tmp_path, ["numpy"])
    (kept,) = tmp_path.iterdir()
    wheel = kept / "numpy-1.0-cp38-x.whl"
    if change == "content":
        with zipfile.ZipFile(wheel, "a") as archive:
            archive.writestr("numpy/evil.py", "")
    elif change == "mode":
        wheel.chmod(0o666)
    elif change == "link":
        wheel.rename(tmp_path / "elsewhere")
        wheel.symlink_to(tmp_path / "elsewhere")
    elif change == "owner":
        if os.geteuid():
            pytest.skip("only root can give files away")
        os.chown(wheel, 12345, 12345)
    else:
        (kept / DIGESTS).unlink()
    monkeypatch.setattr("ringrun.ship.wheels.subprocess.run", lambda *_, **__: pytest.fail("downloads"))
    with pytest.raises(pytest.fail.Exception, match="downloads"):
        fetch_wheels(BOARD, tmp_path, ["numpy"])
    monkeypatch.setattr("ringrun.ship.wheels.subprocess.run", download)
    assert fetch_wheels(BOARD, tmp_path, ["numpy"])[0].digest == package.digest


def test_no_cache_is_used_that_others_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setattr(shipped, "SHARED_PLACES", ())
    with pytest.raises(ConfigError, match=f"{shared}/cache/ringcomm: other users may write to {shared}"):
        trusted_cache({"XDG_CACHE_HOME": str(shared / "cache")})
    found = trusted_cache({"XDG_CACHE_HOME": str(shared / "cache"), "TMPDIR": str(tmp_path)})
    assert found == tmp_path / f"ringcomm-{os.getuid()}"


@pytest.mark.parametrize(
    "version, machine, glibc",
    [
        ("3.8/..", "aarch64", "2.31"), ("3.8", "x/../..", "2.31"), ("3.8", "x86_64", "2.9999999"),
        ("3.8", 5, "2.31"), ("3.8", "aarch64\n", "2.31"), ("", "aarch64", "2.31"),
    ],
)  # fmt: skip
def test_what_a_host_reports_is_checked_before_it_is_part_of_a_path(
    version: Any, machine: Any, glibc: Any
) -> None:
    with pytest.raises(ConfigError, match="it reports an invalid version"):
        Target.of(version, machine, glibc)


def test_a_download_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no wheels of numpy for Python 2.9 on vax with glibc 2.31"):
        fetch_wheels(Target("2.9", "vax", "2.31"), tmp_path, ["numpy"])


def download(argv: List[str], **_: object) -> Any:
    """What pip does."""
    with zipfile.ZipFile(Path(argv[argv.index("--dest") + 1], "numpy-1.0-cp38-x.whl"), "w") as wheel:
        wheel.writestr("numpy/__init__.py", "")
    return subprocess.CompletedProcess(argv, 0, b"", b"")


def test_a_download_goes_to_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringrun.ship.wheels.subprocess.run", download)
    package, (line,) = fetch_wheels(BOARD, tmp_path, ["numpy"])
    assert package.name == "numpy 1.0"
    assert line.startswith("numpy-1.0-cp38-x.whl (sha256 ") and len(line.split("sha256 ")[1]) == 65
    (kept,) = tmp_path.iterdir()
    assert sorted(file.name for file in kept.iterdir()) == [DIGESTS, "numpy-1.0-cp38-x.whl"]


def test_a_download_that_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(argv: List[str], timeout: float, **_: object) -> Any:
        raise subprocess.TimeoutExpired(argv, timeout)

    monkeypatch.setattr("ringrun.ship.wheels.subprocess.run", download)
    with pytest.raises(ConfigError, match="pip did not download numpy and psutil within [0-9]+ s"):
        fetch_wheels(BOARD, tmp_path, ["numpy", "psutil"])
    (kept,) = tmp_path.iterdir()
    assert list(kept.iterdir()) == [], "the folder of the download is removed"
