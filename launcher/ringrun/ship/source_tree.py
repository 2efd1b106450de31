"""The files that ``--ship`` sends: what git tracks or would track, without what ``.ringignore`` names."""

from __future__ import annotations

import ast
import fnmatch
import hashlib
import os
import subprocess
from pathlib import Path, PurePosixPath
from typing import Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

from ringcomm.errors import ConfigError

LIMIT_BYTES = 50 << 20
IGNORE_FILE = ".ringignore"
FETCHED = "fetched"
"""The directory into which ``--fetch`` brings files back; it is never sent."""
JUNK = (
    ".git", ".hg", ".svn", ".venv", "venv", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache",
    ".ipynb_checkpoints", "node_modules", "*.pyc", ".DS_Store",
)  # fmt: skip
"""Left out where there is no git, in every directory."""


class ShippedFile(NamedTuple):
    """One file of a tree.

    Attributes:
        path: relative to the tree, with "/".
        digest: of its content, 32 hexadecimal digits.
        executable: whether its owner may execute it.
    """

    path: str
    digest: str
    executable: bool


class SourceTree:
    """The files of a directory, as they are now.

    Args:
        root: the directory.

    Attributes:
        root: as given, absolute.
        files: the files, by path.
        folders: directories without any of them: empty ones, and those that git ignores. Their names are
            sent, because programs write there.
        size_bytes: their size together.

    Raises:
        ConfigError: the directory cannot be read, a symbolic link leads out of it, or it is too large.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        if not self.root.is_dir():
            raise ConfigError(f"--ship-from: there is no directory {root}.")
        paths = sorted(set(_without_ignored(self.root, listed_files(self.root))))
        self.folders = sorted(_without_ignored(self.root, _folders_without(self.root, paths)))
        sizes = {path: self._checked(path).stat().st_size for path in paths}
        self.size_bytes = sum(sizes.values())
        if self.size_bytes > LIMIT_BYTES:
            raise ConfigError(_too_large(self.root, sizes))
        self._contents: Dict[str, bytes] = {}
        self.files: List[ShippedFile] = []
        for path in paths:
            whole = self.root / path
            content = whole.read_bytes()
            digest = hashlib.sha256(content).hexdigest()[:32]
            self._contents[digest] = content
            self.files.append(ShippedFile(path, digest, os.access(whole, os.X_OK)))

    def _checked(self, path: str) -> Path:
        whole = self.root / path
        if self.root.resolve() not in whole.resolve().parents:
            raise ConfigError(
                f"--ship: {path} is a symbolic link that leads out of {self.root}, to {whole.resolve()}. "
                f"Name it in {IGNORE_FILE}, or copy the file into the directory."
            )
        return whole

    def announced(self) -> List[ShippedFile]:
        """The files, and the folders with "/" at their ends and without a digest: what hosts are to make."""
        return [*self.files, *(ShippedFile(f"{path}/", "", False) for path in self.folders)]

    def contents(self, digests: Iterable[str]) -> Dict[str, bytes]:
        """The contents with these digests; unknown digests are left out."""
        return {digest: self._contents[digest] for digest in digests if digest in self._contents}

    def left_out(self, script: str) -> List[str]:
        """Files and packages next to the script that its tree imports, but that are not sent.

        Args:
            script: the path of the script relative to the tree; outside of it nothing is found.
        """
        paths = {file.path for file in self.files}
        folder = Path(script).parent
        if folder.is_absolute():
            return []
        found: Set[str] = set()
        sources = [file for file in self.files if file.path.endswith(".py")]
        for name in _imported(self._contents[file.digest] for file in sources):
            for candidate in (folder / f"{name}.py", folder / name / "__init__.py"):
                path = candidate.as_posix()
                if path not in paths and (self.root / path).is_file():
                    found.add(path)
        return sorted(found)


def listed_files(root: Path) -> List[str]:
    """The files under a directory that git tracks or would track; without git, all but the usual junk."""
    names = _listed_by_git(root, "--cached", "--others", "--exclude-standard")
    if names is None:
        return list(_walked(root))
    return [name for name in names if (root / name).is_file()]  # a tracked file may have been deleted


def _listed_by_git(root: Path, *options: str) -> Optional[List[str]]:
    """Return what ``git ls-files`` prints; None without git."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "ls-files", "-z", *options],
            stdin=subprocess.DEVNULL, capture_output=True, check=False,
        )  # fmt: skip
    except OSError:
        return None
    return None if done.returncode else [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]


def _walked(root: Path) -> Iterator[str]:
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if not _matches(name, JUNK)]
        for name in files:
            path = Path(folder, name)
            if not _matches(name, JUNK) and path.is_file():
                yield path.relative_to(root).as_posix()


def _folders_without(root: Path, paths: Sequence[str]) -> Iterator[str]:
    """The directories that contain none of the files, and no other directory that counts."""
    there = {parent.as_posix() for path in paths for parent in PurePosixPath(path).parents}
    ignored = set(_listed_by_git(root, "--others", "--ignored", "--exclude-standard", "--directory") or ())
    for folder, names, _ in os.walk(root):
        own = Path(folder).relative_to(root).as_posix()
        names[:] = [name for name in names if not _matches(name, (*JUNK, FETCHED, ".*"))]
        if f"{own}/" in ignored:
            names.clear()
        if own != "." and own not in there and not names:
            yield own


def _without_ignored(root: Path, paths: Iterable[str]) -> Iterator[str]:
    try:
        lines = (root / IGNORE_FILE).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        lines = []
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"--ship: {root / IGNORE_FILE} cannot be read: {problem}.") from None
    patterns = [line.strip().rstrip("/") for line in lines if line.strip() and not line.startswith("#")]
    for path in paths:
        parts = path.split("/")
        if FETCHED in parts[:-1]:
            continue
        above = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
        if not any(_matches(name, patterns) for name in (*parts, *above)):
            yield path


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _too_large(root: Path, sizes: Dict[str, int]) -> str:
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:10]
    rows = "; ".join(f"{path} {size / 1e6:.1f} MB" for path, size in largest)
    return (
        f"--ship: {root} has {sum(sizes.values()) / 1e6:.0f} MB in {len(sizes)} files, and at most "
        f"{LIMIT_BYTES / 1e6:.0f} MB are sent. The largest: {rows}. Name data in {IGNORE_FILE}, and copy it "
        "by hand or read it from a shared directory."
    )


def _imported(sources: Iterable[bytes]) -> Set[str]:
    """The first parts of the names of all modules that sources import."""
    names: Set[str] = set()
    for source in sources:
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue  # for another Python, or no Python: the ranks will say
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.partition(".")[0])
    return names


def position(root: Path, cwd: Path) -> str:
    """The working directory relative to the tree, with "/"; "." for the tree itself.

    Raises:
        ConfigError: it is not in the tree.
    """
    try:
        return cwd.resolve().relative_to(root.resolve()).as_posix()
    except ValueError:
        raise ConfigError(
            f"--ship-from {root}: the working directory {cwd} is not in it, so the ranks could not run in "
            "their copy of it. Name that directory or one above it."
        ) from None


def describe_sent(host: str, sent: Tuple[int, int, int]) -> str:
    """The line that says what was sent.

    Args:
        host: the host's name.
        sent: number of files sent, number of files of the tree, bytes sent.
    """
    count, whole, size = sent
    return f"sent {count} of {whole} files to {host}, {size / 1e6:.1f} MB"
