"""Fixtures for tests with ranks of x86-64 and of ARM: `lab` has two hosts of Debian for arm64, `pi` is one of
ARM of 32 bits (armhf).

They run in emulation (QEMU): a test shows that calls, layouts and numbers agree, and does not show what
a processor of arm64 does to the order of loads and stores, and its times mean nothing.
`tests/run.sh --only aarch64` makes the root file system; without it the tests are skipped.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Iterator, List

import pytest

from tests.hosts.job import ROOT
from tests.hosts.netlab import Host, Lab

PROGRAMS = Path(__file__).parent / "programs"
FILES, FILES_32 = ROOT / ".root-aarch64", ROOT / ".root-armhf"
HOSTS, HOST_32 = ("jetson1", "jetson2"), "pi1"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: List[pytest.Item]) -> None:
    """Mark every test in this directory with `aarch64`."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.aarch64)


@pytest.fixture(scope="session")
def session_lab() -> Iterator[Lab]:
    """The one lab that `lab` lends to each test."""
    if not (FILES / "made-from").exists():
        pytest.skip("there is no root file system of arm64: bash tests/run.sh --only aarch64 makes it")
    if subprocess.run(["chroot", str(FILES), "/bin/true"], capture_output=True, check=False).returncode:
        pytest.skip("programs for arm64 do not run: bash tests/run.sh --only aarch64 registers an emulator")
    reason = Lab.unavailable()
    if reason is not None:
        pytest.skip(f"cannot make several hosts here: {reason}")
    files = dict.fromkeys(HOSTS, FILES)
    if (FILES_32 / "made-from").exists():
        files[HOST_32] = FILES_32
    with Lab(*(Host(name, wlan=None, root=str(root)) for name, root in files.items())) as lab:
        yield lab


@pytest.fixture
def lab(session_lab: Lab) -> Iterator[Lab]:
    """Two hosts of aarch64, jetson1 and jetson2, shared by all tests; processes end after each one."""
    yield session_lab
    session_lab.restore()


@pytest.fixture
def pi(lab: Lab) -> str:
    """The host of 32 bits in the lab."""
    if HOST_32 not in [host.name for host in lab.hosts]:
        pytest.skip("there is no root file system of armhf: bash tests/run.sh --only aarch64 makes it")
    return HOST_32


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder that is sent to the hosts: the programs, and what they import."""
    folder = tmp_path / "project"
    shutil.copytree(PROGRAMS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "tests" / "support").mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "support" / "reference.py", folder / "tests" / "support")
    return folder
