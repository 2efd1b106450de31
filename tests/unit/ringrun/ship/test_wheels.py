from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path
from typing import Any, Dict, List

import pytest

from ringcomm.errors import ConfigError
from ringrun.agent import shipped
from ringrun.ship.wheels import Target, download_argv, fetch_wheels, platform_tags

BOARD = Target("3.8", "aarch64", "2.31")


def test_platform_tags_go_down_from_the_hosts_c_library() -> None:
    tags = platform_tags(BOARD)
    assert tags[0] == "manylinux_2_31_aarch64"
    assert "manylinux_2_17_aarch64" in tags and "manylinux2014_aarch64" in tags
    assert "manylinux_2_32_aarch64" not in tags


@pytest.mark.parametrize("glibc", ["", "3.1", "2.x", "2.9999999"])
def test_another_c_library_is_refused(glibc: str) -> None:
    with pytest.raises(ConfigError, match=r"glibc only.*package manager"):
        platform_tags(BOARD._replace(glibc=glibc))


def test_pip_downloads_for_the_host_and_not_for_this_machine() -> None:
    argv = download_argv(BOARD, "/folder", ["numpy"])
    for option, value in [("--python-version", "3.8"), ("--implementation", "cp"), ("--dest", "/folder")]:
        assert argv[argv.index(option) + 1] == value
    assert "--only-binary=:all:" in argv and "--no-deps" in argv and argv[-1] == "numpy"


class Pip:
    """Writes wheels as pip does, and counts how often."""

    def __init__(self) -> None:
        self.calls = 0
        self.version = "1.0"

    def __call__(self, argv: List[str], **_: object) -> Any:
        self.calls += 1
        folder = Path(argv[argv.index("--dest") + 1])
        for name in argv[argv.index("--dest") + 2 :]:
            with zipfile.ZipFile(folder / f"{name}-{self.version}-cp38-cp38-linux_aarch64.whl", "w") as wheel:
                wheel.writestr(f"{name}/__init__.py", "")
                wheel.writestr(f"{name}/tests/test_it.py", "")
        return subprocess.CompletedProcess(argv, 0, b"", b"")


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Pip:
    made = Pip()
    monkeypatch.setattr("ringrun.ship.wheels.subprocess.run", made)
    return made


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Dict[str, str]:
    monkeypatch.setattr(shipped, "SHARED_PLACES", ())
    return {"XDG_CACHE_HOME": str(tmp_path / "cache")}


def kept_in(environ: Dict[str, str]) -> Path:
    return Path(environ["XDG_CACHE_HOME"], "ringcomm", "wheels-cp3.8-aarch64-glibc2.31")


def test_wheels_of_an_earlier_job_are_used_again(pip: Pip, environ: Dict[str, str]) -> None:
    package, lines = fetch_wheels(BOARD, environ)
    assert package.name == "numpy 1.0, psutil 1.0" and pip.calls == 1
    files = sorted(file.name for file in kept_in(environ).glob("*.whl"))
    assert [line.split()[0] for line in lines] == files
    assert all(len(line.split("sha256 ")[1]) == 65 for line in lines)
    again, lines = fetch_wheels(BOARD, environ)
    assert again.digest == package.digest and pip.calls == 1
    assert lines == [], "the digests are shown when they are downloaded"


def test_of_each_package_there_is_one_version(pip: Pip, environ: Dict[str, str]) -> None:
    fetch_wheels(BOARD, environ, ["psutil"])
    pip.version = "2.0"
    package, (line,) = fetch_wheels(BOARD, environ)
    assert package.name == "numpy 2.0, psutil 1.0" and line.startswith("numpy-2.0-")
    assert fetch_wheels(BOARD, environ)[0].digest == package.digest and pip.calls == 2


@pytest.mark.parametrize("change", ["a link", "others may write", "removed"])
def test_a_wheel_that_is_not_as_it_was_downloaded_is_not_used(
    pip: Pip, environ: Dict[str, str], tmp_path: Path, change: str
) -> None:
    package, _ = fetch_wheels(BOARD, environ)
    wheel = next(kept_in(environ).glob("numpy*"))
    evil = tmp_path / "evil.whl"
    with zipfile.ZipFile(evil, "w") as archive:
        archive.writestr("numpy/__init__.py", "import evil")
    if change == "others may write":
        wheel.chmod(0o666)
    else:
        wheel.unlink()
    if change == "a link":
        wheel.symlink_to(evil)
    again, _ = fetch_wheels(BOARD, environ)
    assert again.digest == package.digest and pip.calls == 2


def test_a_download_that_fails_says_why(environ: Dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess((), 1, b"", b"ERROR: No matching distribution found for numpy\n")
    monkeypatch.setattr("ringrun.ship.wheels.subprocess.run", lambda *_, **__: failed)
    with pytest.raises(ConfigError, match="no wheels of numpy for Python 2.9 on vax with glibc 2.31"):
        fetch_wheels(Target("2.9", "vax", "2.31"), environ, ["numpy"])
