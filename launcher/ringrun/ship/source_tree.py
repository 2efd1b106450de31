"""The files that ``--ship`` sends: those that git tracks or would track, except for ``.ringignore``'s."""

from __future__ import annotations

import fnmatch
import hashlib
import os
import subprocess
import time
from pathlib import Path, PurePosixPath
from typing import Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

from ringcomm.errors import ConfigError

LIMIT_BYTES = 50 * 10**6
COUNT_S = 2.0
"""Time for counting a tree that is too large, to name its largest files."""
MAX_NAMED = 5
"""Maximum number of ignored files and directories in a message."""
IGNORE_FILE = ".ringignore"
FETCHED = "fetched"
"""The directory into which ``--fetch`` brings files back; it is never sent."""
JUNK = (
    ".git", ".hg", ".svn", ".venv", "venv", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache",
    ".ipynb_checkpoints", "node_modules", "*.pyc", ".DS_Store",
)  # fmt: skip
"""Ignored in every directory if there is no git."""


class ShippedFile(NamedTuple):
    """One file of a tree: its path in the tree with "/", and its content's digest, 32 hexadecimal digits."""

    path: str
    digest: str
    executable: bool


class SourceTree:
    """The files of a directory at present; ConfigError if it cannot be sent."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        if not self.root.is_dir():
            raise ConfigError(f"--ship: there is no directory {root}.")
        self._real, patterns = self.root.resolve(), _ignore_patterns(self.root)
        sizes, ignored = self._sizes(patterns)
        self.size_bytes = sum(sizes.values())
        by_git = _ignored_by_git(self.root)
        self.ignored = sorted(ignored.union(by_git))  # by git or .ringignore; directories end with "/"
        # Without files to send: empty, or ignored by git. Programs may write there.
        folders = _folders_without(self.root, list(sizes), by_git)
        self.folders = sorted(path for path in folders if not _ignored_part(path, patterns))
        self._contents: Dict[str, bytes] = {}
        self.files: List[ShippedFile] = []
        for path in sorted(sizes):
            whole = self.root / path
            content = whole.read_bytes()
            digest = hashlib.sha256(content).hexdigest()[:32]
            self._contents[digest] = content
            self.files.append(ShippedFile(path, digest, os.access(whole, os.X_OK)))

    def _sizes(self, patterns: Sequence[str]) -> Tuple[Dict[str, int], Set[str]]:
        """Return the files with their sizes, and the paths that ``.ringignore`` excludes."""
        sizes: Dict[str, int] = {}
        ignored: Set[str] = set()
        size_bytes, until_s = 0, float("inf")
        for path in listed_files(self.root, patterns):
            part = _ignored_part(path, patterns)
            if part:
                ignored.add(part)
            elif FETCHED not in path.split("/")[:-1]:
                sizes[path] = self._checked(path).stat().st_size
                size_bytes += sizes[path]
            if size_bytes > LIMIT_BYTES:
                now_s = time.monotonic()
                until_s = min(until_s, now_s + COUNT_S)
                if now_s >= until_s:
                    raise ConfigError(_too_large(self.root, sizes, "more than "))
        if sum(sizes.values()) > LIMIT_BYTES:
            raise ConfigError(_too_large(self.root, sizes))
        return sizes, ignored

    def _checked(self, path: str) -> Path:
        whole = self.root / path
        if self._real not in whole.resolve().parents:
            raise ConfigError(
                f"--ship: {path} is a symbolic link that leads out of {self.root}, to {whole.resolve()}. "
                f"Name it in {IGNORE_FILE}, or copy the file into the directory."
            )
        return whole

    def announced(self) -> List[ShippedFile]:
        """Return the files, and the folders that hosts must make (with "/" at the end, without a digest)."""
        return [*self.files, *(ShippedFile(f"{path}/", "", False) for path in self.folders)]

    def contents(self, digests: Iterable[str]) -> Dict[str, bytes]:
        """Return the contents with these digests; unknown digests are left out."""
        return {digest: self._contents[digest] for digest in digests if digest in self._contents}

    def why_not_sent(self, path: Path) -> str:
        """Return why a file or directory of this machine was not sent, for a sentence."""
        try:
            own = path.resolve().relative_to(self._real).as_posix()
        except ValueError:
            return f"it is not in {self.root}"
        if any(f"{own}/".startswith(f"{item.rstrip('/')}/") for item in self.ignored):
            return f"git or {IGNORE_FILE} leaves it out"
        return "it is none of the files that were sent when the job started"


def listed_files(root: Path, patterns: Sequence[str] = ()) -> Iterator[str]:
    """Yield the files that git tracks or would track; without git, all but junk, and ignored directories."""
    names = _listed_by_git(root, "--cached", "--others", "--exclude-standard")
    if names is None:
        return _walked(root, patterns)
    return (name for name in names if (root / name).is_file())  # a tracked file may have been deleted


def _listed_by_git(root: Path, *options: str) -> Optional[List[str]]:
    """Return the output of ``git ls-files``; None without git."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "ls-files", "-z", *options],
            stdin=subprocess.DEVNULL, capture_output=True, check=False,
        )  # fmt: skip
    except OSError:
        return None
    return None if done.returncode else [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]


def _ignored_by_git(root: Path) -> List[str]:
    return _listed_by_git(root, "--others", "--ignored", "--exclude-standard", "--directory") or []


def _walked(root: Path, patterns: Sequence[str]) -> Iterator[str]:
    for folder, names, files in os.walk(root):
        own = Path(folder).relative_to(root)
        names[:] = [name for name in names if not _matches(name, JUNK)]
        left_out = [name for name in names if _ignored_part((own / name).as_posix(), patterns)]
        names[:] = [name for name in names if name not in left_out]
        yield from (f"{(own / name).as_posix()}/" for name in left_out)
        for name in files:
            if not _matches(name, JUNK) and Path(folder, name).is_file():
                yield (own / name).as_posix()


def _folders_without(root: Path, paths: Sequence[str], ignored: Sequence[str]) -> Iterator[str]:
    """Yield the directories that contain none of the files, and no other directory that counts."""
    there = {parent.as_posix() for path in paths for parent in PurePosixPath(path).parents}
    for folder, names, _ in os.walk(root):
        own = Path(folder).relative_to(root).as_posix()
        names[:] = [name for name in names if not _matches(name, (*JUNK, FETCHED, ".*"))]
        if f"{own}/" in ignored:
            names.clear()
        if own != "." and own not in there and not names:
            yield own


def _ignore_patterns(root: Path) -> List[str]:
    try:
        lines = (root / IGNORE_FILE).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        lines = []
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"--ship: {root / IGNORE_FILE} cannot be read: {problem}.") from None
    return [line.strip().rstrip("/") for line in lines if line.strip() and not line.startswith("#")]


def _ignored_part(path: str, patterns: Sequence[str]) -> str:
    """Return the path, or the directory above it with "/" at its end, that a pattern matches; or ""."""
    parts = path.split("/")
    for count, name in enumerate(parts, 1):
        above = "/".join(parts[:count])
        if _matches(name, patterns) or _matches(above, patterns):
            return above if above == path else f"{above}/"
    return ""


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _too_large(root: Path, sizes: Dict[str, int], more: str = "") -> str:
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:10]
    rows = "; ".join(f"{path} {size / 1e6:.1f} MB" for path, size in largest)
    remedy = f"Name data in {IGNORE_FILE}, and copy it by hand or read it from a shared directory."
    if root == Path(os.path.expanduser("~")):  # noqa: PTH111  users without a home
        remedy = "It is your home directory: start ringrun in the directory of the program."
    return (
        f"--ship: {root} has {more}{sum(sizes.values()) / 1e6:.0f} MB in {more}{len(sizes)} files, and at "
        f"most {LIMIT_BYTES / 1e6:.0f} MB are sent. The largest: {rows}. {remedy}"
    )


def position(root: Path, cwd: Path) -> str:
    """Return the working directory in the tree, with "/"; "." for the tree. ConfigError if it is outside."""
    try:
        return cwd.resolve().relative_to(root.resolve()).as_posix()
    except ValueError:
        raise ConfigError(
            f"--ship={root}: the working directory {cwd} is not in it, so the ranks could not run in "
            "their copy of it. Name that directory or one above it."
        ) from None


def describe_sent(host: str, sent: Tuple[int, int, int], ignored: Sequence[str]) -> str:
    """Return the line about the sent files (their number, the tree's, bytes) and the ignored ones."""
    count, whole, size = sent
    text = f"sent {count} of {whole} files to {host}, {size / 1e6:.1f} MB"
    named = [path for path in ignored if not any(_matches(part, (*JUNK, ".*")) for part in path.split("/"))]
    more = f" and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
    left_out = f"; git or {IGNORE_FILE} leaves out {', '.join(named[:MAX_NAMED])}{more}"
    return text + left_out if named else text
