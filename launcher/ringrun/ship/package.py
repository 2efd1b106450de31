"""Packages to send to hosts: a digest of the files, and a zip file that is made when a host requests it."""

from __future__ import annotations

import io
import zipfile
from functools import lru_cache
from pathlib import Path
from typing import Dict, Iterator, Mapping, Tuple

from ringcomm.version import __version__

from ..agent.shipped import digest

_DATE = (1980, 1, 1, 0, 0, 0)
"""The date of every member, so that equal files give equal archives."""


class Package:
    """Files that a host adds to the module path of its ranks, and finds in its cache by their `digest`."""

    def __init__(self, name: str, files: Mapping[str, bytes]) -> None:
        self.name = name
        self.digest = digest(files.items())
        self._files: Dict[str, bytes] = dict(files)
        self._archive = b""

    @property
    def archive(self) -> bytes:
        """The files as a compressed zip file."""
        if not self._archive:
            buffer = io.BytesIO()
            with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
                for name in sorted(self._files):
                    archive.writestr(zipfile.ZipInfo(name, _DATE), self._files[name], zipfile.ZIP_DEFLATED)
            self._archive = buffer.getvalue()
        return self._archive


@lru_cache(maxsize=None)
def own_package() -> Package:
    """Return ringcomm, ringrun and cloudpickle, as they are installed on this machine."""
    import cloudpickle

    import ringcomm
    import ringrun

    files: Dict[str, bytes] = {}
    for module in (ringcomm, ringrun, cloudpickle):
        files.update(_sources(Path(str(module.__file__)).parent))
    files.update(_metadata())
    return Package(f"ringcomm {__version__}", files)


def _metadata() -> Iterator[Tuple[str, bytes]]:
    """Yield the entry point by which PyTorch finds the backend, as pyproject.toml installs it."""
    folder = f"ringcomm-{__version__}.dist-info"
    yield f"{folder}/METADATA", f"Metadata-Version: 2.1\nName: ringcomm\nVersion: {__version__}\n".encode()
    yield f"{folder}/entry_points.txt", b"[torch.backends]\nringcomm = ringrun.torch_backend:announce\n"


def _sources(folder: Path) -> Iterator[Tuple[str, bytes]]:
    """Yield the files of an imported package, by their paths from the package's parent directory."""
    for path in folder.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc":
            yield path.relative_to(folder.parent).as_posix(), path.read_bytes()
