"""Frames of agents, and the interpreter of an environment at another path on a host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import List, Optional

import pytest

from ringcomm.errors import ProtocolError
from ringrun.agent import framing
from ringrun.reach.protocol import BOOT, FRAME_LIMIT_BYTES, Frame, FrameReader, finder

FRAMES = [
    Frame(framing.STDOUT, 3, b"hello\n"), Frame(framing.EVENT, -1, b"{}"), Frame(framing.RESULT, 0, b"")
]  # fmt: skip
STREAM = b"".join(
    framing.TO_LAUNCHER.pack(kind, rank, len(data)) + data + framing.FRAME_END for kind, rank, data in FRAMES
)


@pytest.mark.parametrize(
    "noise", [b"", b"Welcome!\n", b"no line end", b"\nringrun-agent/\n", b"\xff" * 10000]
)
@pytest.mark.parametrize("size", [1, 7, 100000])
def test_frames_after_noise(noise: bytes, size: int) -> None:
    reader = FrameReader()
    data = noise + framing.MARKER + STREAM + b"\x01\x00"
    found: List[Frame] = []
    for start in range(0, len(data), size):
        found += reader.feed(data[start : start + size])
    assert found == FRAMES
    assert reader.started
    assert bytes(reader.noise) == noise[:4096]


def test_endless_noise_is_refused() -> None:
    reader = FrameReader()
    with pytest.raises(ProtocolError, match="1 MiB of output"):
        for _ in range(100):
            reader.feed(b"x" * 65536)


@pytest.mark.parametrize(("kind", "length"), [(0, 1), (9, 1), (framing.STDOUT, FRAME_LIMIT_BYTES + 1)])
def test_impossible_frames_are_refused(kind: int, length: int) -> None:
    reader = FrameReader()
    with pytest.raises(ProtocolError):
        reader.feed(framing.MARKER + framing.TO_LAUNCHER.pack(kind, 0, length))


def test_a_frame_that_does_not_end_where_it_says_is_refused() -> None:
    reader = FrameReader()
    with pytest.raises(ProtocolError, match="does not end there"):
        reader.feed(framing.MARKER + framing.TO_LAUNCHER.pack(framing.STDOUT, 0, 2) + b"abcd")


PROGRAM = "import sys; print(sys.executable, sys.argv, f.readline())"


@pytest.fixture
def conda(tmp_path: Path) -> str:
    """The interpreter of an environment of conda, with the name train."""
    prefix = tmp_path / "miniconda3" / "envs" / "train"
    (prefix / "conda-meta").mkdir(parents=True)
    return str(prefix / "bin" / "python")


def run(python: str, home: Path) -> List[str]:
    """Return what runs on a host with this home: the interpreter, its arguments and the next line."""
    script = f"import os,sys;{BOOT.partition(';')[2]}"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60,
        input=(finder(python, str(home / "here")) + f"exec({PROGRAM!r})\nthe next line\n".encode()).decode(),
        env={**os.environ, "HOME": str(home)},
    )  # fmt: skip
    return done.stdout.split(maxsplit=1)


def link(path: Path, target: Optional[str] = None) -> str:
    path.parent.mkdir(parents=True)
    path.symlink_to(target or sys.executable)
    return str(path)


def test_it_takes_the_place_of_the_interpreter_and_reads_on(tmp_path: Path) -> None:
    own = link(tmp_path / "work" / ".venv" / "bin" / "python")
    python, rest = run(str(tmp_path / "here" / "work" / ".venv" / "bin" / "python"), tmp_path)
    assert python == own and rest == "['-c'] b'the next line\\n'\n"


def test_an_environment_that_conda_lists(conda: str, tmp_path: Path) -> None:
    own = link(tmp_path / "host" / "data" / "train" / "bin" / "python")
    (tmp_path / "host" / ".conda").mkdir()
    listed = ["relative/train", f"{tmp_path}/host/data/other", f"{tmp_path}/host/none/train", ""]
    listed.append(str(Path(own).parents[1]))
    (tmp_path / "host" / ".conda" / "environments.txt").write_text("\n".join(listed))
    assert run(conda, tmp_path / "host")[0] == own


@pytest.mark.parametrize("what", ["nothing", "directory", "broken link", "not executable"])
def test_without_it_the_interpreter_stays(what: str, conda: str, tmp_path: Path) -> None:
    path = tmp_path / "host" / "miniconda3" / "envs" / "train" / "bin" / "python"
    path.parent.mkdir(parents=True)
    if what == "directory":
        path.mkdir()
    elif what == "broken link":
        path.symlink_to("nowhere")
    elif what == "not executable":
        path.symlink_to("/etc/passwd")
    assert run(conda, tmp_path / "host")[0] == sys.executable
