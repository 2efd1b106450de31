"""What hosts get: ringcomm itself, the wheels of packages that it needs (``--provision``), and the user's
files (``--ship``): those that git tracks or would track, except for those in ``.ringignore``; and what hosts
send back.
"""

from __future__ import annotations

import fnmatch
import hashlib
import io
import os
import re
import subprocess
import sys
import threading
import time
import zipfile
from collections import Counter
from contextlib import ExitStack
from functools import cached_property, lru_cache
from pathlib import Path, PurePosixPath
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
)
from typing import Counter as Counts

from ringcomm.errors import ConfigError, ProtocolError
from ringcomm.storage.files import PartialFile, open_at, read_at, write_all, write_file
from ringcomm.storage.folders import inner_folder, new_folder, own_folder, owned_names, remove
from ringcomm.version import __version__

from ..agent import framing
from ..agent.checks import PROVISIONED
from ..agent.shipped import digest, in_first_place
from ..plan.job import HostJob, Job
from ..reach.base import last_lines, quoted
from ..reach.incoming import decoded, fields, flag, maybe, said, text, whole
from .agents import Agents, Loop

_DATE = (1980, 1, 1, 0, 0, 0)  # of every member, so that equal files give equal archives


class Package:
    """Files that a host adds to the module path of its ranks, and finds in its cache by their `digest`."""

    def __init__(self, name: str, files: Mapping[str, bytes]) -> None:
        self.name = name
        self.digest = digest(files.items())
        self._files = dict(files)

    @cached_property
    def archive(self) -> bytes:
        """The files as a compressed zip file, which is made when a host requests it."""
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in sorted(self._files):
                archive.writestr(zipfile.ZipInfo(name, _DATE), self._files[name], zipfile.ZIP_DEFLATED)
        return buffer.getvalue()


@lru_cache(maxsize=None)
def own_package() -> Package:
    """Return ringcomm, ringrun and cloudpickle, as they are installed on this machine."""
    import cloudpickle

    import ringcomm
    import ringrun

    files = dict(entry_point())
    for module in (ringcomm, ringrun, cloudpickle):
        folder = Path(str(module.__file__)).parent
        for path in folder.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc":
                files[path.relative_to(folder.parent).as_posix()] = path.read_bytes()
    return Package(f"ringcomm {__version__}", files)


def entry_point() -> Iterator[Tuple[str, bytes]]:
    """Yield the entry point by which PyTorch finds the backend, as pyproject.toml installs it."""
    folder = f"ringcomm-{__version__}.dist-info"
    yield f"{folder}/METADATA", f"Metadata-Version: 2.1\nName: ringcomm\nVersion: {__version__}\n".encode()
    yield f"{folder}/entry_points.txt", b"[torch.backends]\nringcomm = ringrun.torch_backend:announce\n"


# -- wheels ---------------------------------------------------------------------------------------
# They are downloaded on this machine by pip, for the interpreter, the processor and the C library of the
# host, and kept for the next job, in a folder in which no other user can change anything. A wheel is a zip
# file whose extension modules find their own libraries by relative paths, so the host only has to unpack it
# into a directory on the module path: it needs neither pip nor a virtual environment.

DOWNLOAD_LIMIT_S = 120.0
_OLDEST_GLIBC = 5
_WHEEL = re.compile(r"[\w.+!-]+\.whl")


class Target(NamedTuple):
    """The interpreter that a wheel is for."""

    version: str  # of CPython, like "3.8"
    machine: str  # as `uname -m` prints it
    glibc: str  # like "2.31"; "" for another C library


def platform_tags(target: Target) -> List[str]:
    """Return the platform tags of wheels that a host can use, the newest first (PEP 600)."""
    major, _, minor = target.glibc.partition(".")
    if major != "2" or not re.fullmatch("[0-9]{1,3}", minor):
        raise ConfigError(
            f"--provision: the C library of that host is {target.glibc or 'not glibc'}; there are wheels for "
            "glibc only. Install numpy there with the system's package manager."
        )
    tags = [f"manylinux_2_{number}_{target.machine}" for number in range(int(minor), _OLDEST_GLIBC - 1, -1)]
    return [*tags, f"manylinux2014_{target.machine}", f"manylinux1_{target.machine}"]


def download_argv(target: Target, folder: str, names: Sequence[str]) -> List[str]:
    """Return the command line of pip that downloads wheels."""
    platforms = [word for tag in platform_tags(target) for word in ("--platform", tag)]
    return [
        sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps",
        "--only-binary=:all:", "--implementation", "cp", "--python-version", target.version, *platforms,
        "--dest", folder, *names,
    ]  # fmt: skip


def fetch_wheels(
    target: Target, environ: Optional[Mapping[str, str]] = None, names: Sequence[str] = PROVISIONED
) -> Tuple[Package, List[str]]:
    """Return one package of wheels, and a line with name and SHA-256 for each that was downloaded now."""
    wheels: Dict[str, bytes] = {}
    lines: List[str] = []

    def fill(place: str, folder: int) -> str:
        name = f"wheels-cp{target.version}-{target.machine}-glibc{target.glibc}"
        with inner_folder(folder, name) as kept:
            before = _kept(kept).items()
            known = {each: row for row in before for each in names if row[0].startswith(f"{each}-")}
            wheels.update(known.values())
            missing = [each for each in names if each not in known]
            for wheel, data in sorted(_downloaded(target, kept, f"{place}/{name}", missing).items()):
                write_file(kept, wheel, data)
                lines.append(f"{wheel} (sha256 {hashlib.sha256(data).hexdigest()})")
                wheels[wheel] = data
        return name

    try:
        in_first_place(os.environ if environ is None else environ, fill)
    except OSError as problem:
        raise ConfigError(f"--provision: no directory can hold the wheels: {problem}.") from None
    files: Dict[str, bytes] = {}
    for data in (wheels[wheel] for wheel in sorted(wheels)):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            inside = [name for name in archive.namelist() if not name.endswith("/") and "/tests/" not in name]
            files.update((name, archive.read(name)) for name in inside)
    return Package(", ".join(" ".join(wheel.split("-")[:2]) for wheel in sorted(wheels)), files), lines


def _kept(folder: int) -> Dict[str, bytes]:
    """Return the wheels of earlier jobs by name; none if another user could change one, and no hard links."""
    try:
        known = [name for name, facts in owned_names(folder, _WHEEL) if facts.st_nlink == 1]
        return {name: read_at(folder, name) for name in known}
    except OSError:
        return {}  # downloaded again


def _downloaded(target: Target, kept: int, path: str, names: Sequence[str]) -> Dict[str, bytes]:
    """Download wheels to a temporary directory in the folder `path` with the descriptor `kept`."""
    if not names:
        return {}
    fresh = new_folder(kept, ".new-")
    try:
        _download(target, f"{path}/{fresh}", names)
        wheels: Dict[str, bytes] = {}
        with inner_folder(kept, fresh, None) as folder:
            for name, _ in owned_names(folder, _WHEEL):
                with open(open_at(folder, name), "rb") as file:  # pip made it with the user's umask
                    wheels[name] = file.read()
        return wheels
    finally:
        remove(kept, fresh)


def _download(target: Target, folder: str, names: Sequence[str]) -> None:
    try:
        done = subprocess.run(
            download_argv(target, folder, names), stdin=subprocess.DEVNULL, capture_output=True,
            timeout=DOWNLOAD_LIMIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"--provision: pip did not download {' and '.join(names)} within {DOWNLOAD_LIMIT_S:g} s."
        ) from None
    if done.returncode:
        said = last_lines(done.stderr.decode("utf-8", "replace"))
        raise ConfigError(
            f"--provision: pip found no wheels of {' and '.join(names)} for Python {target.version} on "
            f"{target.machine} with glibc {target.glibc} ({said}). Install them there by hand."
        )


# -- the user's files -----------------------------------------------------------------------------

LIMIT_BYTES = 50 * 10**6
COUNT_S = 2.0  # for counting a tree that is too large, to name its largest files
MAX_NAMED = 5  # ignored files and directories in a message
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
        by_git = _listed_by_git(self.root, "--others", "--ignored", "--exclude-standard", "--directory") or []
        self.ignored = sorted(ignored.union(by_git))  # by git or .ringignore; directories end with "/"
        # Without files to send: empty, or ignored by git. Programs may write there.
        folders = _folders_without(self.root, list(sizes), by_git)
        self.folders = sorted(path for path in folders if not _ignored_part(path, patterns))
        self._contents: Dict[str, bytes] = {}
        self.files: List[ShippedFile] = []
        for path in sorted(sizes):
            content = (self.root / path).read_bytes()
            hashed = hashlib.sha256(content).hexdigest()[:32]
            self._contents[hashed] = content
            self.files.append(ShippedFile(path, hashed, os.access(self.root / path, os.X_OK)))

    def _sizes(self, patterns: Sequence[str]) -> Tuple[Dict[str, int], Set[str]]:
        """Return the files with their sizes, and the paths that ``.ringignore`` excludes."""
        sizes: Dict[str, int] = {}
        ignored: Set[str] = set()
        size_bytes, until_s = 0, float("inf")
        for path in _listed_files(self.root, patterns):
            part = _ignored_part(path, patterns)
            if part:
                ignored.add(part)
            elif FETCHED not in path.split("/")[:-1]:
                sizes[path] = self._checked(path).stat().st_size
                size_bytes += sizes[path]
            if size_bytes > LIMIT_BYTES:
                until_s = min(until_s, time.monotonic() + COUNT_S)
            if time.monotonic() >= until_s:
                raise ConfigError(_too_large(self.root, sizes, "more than "))
        if size_bytes > LIMIT_BYTES:
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


def _listed_files(root: Path, patterns: Sequence[str]) -> Iterator[str]:
    """Yield the files that git tracks or would track; without git, all but junk, and ignored directories."""
    names = _listed_by_git(root, "--cached", "--others", "--exclude-standard")
    if names is None:
        return _walked(root, patterns)
    return (name for name in names if (root / name).is_file())  # a tracked file may have been deleted


def _listed_by_git(root: Path, *options: str) -> Optional[List[str]]:
    """Return the output of ``git ls-files``; None without git."""
    argv = ["git", "-C", str(root), "ls-files", "-z", *options]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except OSError:
        return None
    return None if done.returncode else [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]


def _walked(root: Path, patterns: Sequence[str]) -> Iterator[str]:
    for folder, names, files in os.walk(root):
        own = Path(folder).relative_to(root)
        names[:] = [name for name in names if not _fits(name, JUNK)]
        left_out = [name for name in names if _ignored_part((own / name).as_posix(), patterns)]
        names[:] = [name for name in names if name not in left_out]
        yield from (f"{(own / name).as_posix()}/" for name in left_out)
        for name in files:
            if not _fits(name, JUNK) and Path(folder, name).is_file():
                yield (own / name).as_posix()


def _folders_without(root: Path, paths: Sequence[str], ignored: Sequence[str]) -> Iterator[str]:
    """Yield the directories that contain none of the files, and no other directory that counts."""
    there = {parent.as_posix() for path in paths for parent in PurePosixPath(path).parents}
    for folder, names, _ in os.walk(root):
        own = Path(folder).relative_to(root).as_posix()
        names[:] = [name for name in names if not _fits(name, (*JUNK, FETCHED, ".*"))]
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
        if _fits(name, patterns) or _fits(above, patterns):
            return above if above == path else f"{above}/"
    return ""


def _fits(name: str, patterns: Sequence[str]) -> bool:
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
    named = [path for path in ignored if not any(_fits(part, (*JUNK, ".*")) for part in path.split("/"))]
    more = f" and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
    left_out = f"; git or {IGNORE_FILE} leaves out {', '.join(named[:MAX_NAMED])}{more}"
    return text + left_out if named else text


# -- what hosts request --------------------------------------------------------------------------

MAX_HOST_BYTES = 100 * 10**9  # from one host, as of files
MAX_HOST_FILES = 100_000
MAX_PARTS = 64  # of a path
MAX_PROBLEMS = 100  # that are reported
MIN_FREE_BYTES = 1 << 30  # that stay free in the file system
Wanted = Tuple[Target, Tuple[str, ...]]  # and the packages


class Supply:
    """The packages of one job, and those that each host uses now."""

    def __init__(
        self, agents: Agents, loop: Loop, say: Callable[[str], None], problem: Callable[[HostJob, str], None]
    ) -> None:
        self._agents, self._loop, self._print, self._problem = agents, loop, say, problem
        self._wheels: Dict[int, Package] = {}  # by host: the package that it uses after ringcomm's
        self._waiting: Dict[Wanted, List[HostJob]] = {}  # hosts whose wheels are being downloaded

    def send(self, host: HostJob, facts: Mapping[str, Any]) -> None:
        """Send a host what its agent's ``lacks`` event names: ``files`` by digest, or else its package."""
        tree = self._agents.job.tree
        if "files" in facts and tree is not None:
            sent = Package("files", tree.contents(facts["files"]))
            counts = len(facts["files"]), len(tree.files), len(sent.archive)
            self._print(describe_sent(host.name, counts, tree.ignored))
            self._agents.links[host.index].send_frame(framing.CODE, sent.archive)
            return
        package = self._wheels.get(host.index) or own_package()
        self._print(f"sending {package.name} to {host.name} ({len(package.archive) / 1e6:.1f} MB)")
        self._agents.links[host.index].send_frame(framing.PACKAGE, package.archive)

    def provision(self, host: HostJob, facts: Mapping[str, Any]) -> None:
        """Download the wheels of a ``needs`` event in a thread, once for equal hosts, which then use them."""
        version = str(facts["found"].get("version", "")).rpartition(".")[0]
        lacks = facts["found"].get("lacks", PROVISIONED)
        target = Target(version, facts["machine"], facts["glibc"])
        wanted = target, tuple(name for name in PROVISIONED if name in lacks)
        if wanted in self._waiting:
            self._waiting[wanted].append(host)
            return
        self._waiting[wanted] = [host]
        threading.Thread(target=self._download, args=(wanted,), daemon=True).start()

    def _download(self, wanted: Wanted) -> None:
        target, names = wanted
        try:
            found = fetch_wheels(target, names=names)
        except (ConfigError, OSError, zipfile.BadZipFile) as problem:
            text = str(problem)
            self._loop.call(lambda: self._not_downloaded(wanted, text))
        else:
            self._loop.call(lambda: self._downloaded(wanted, *found))

    def _not_downloaded(self, wanted: Wanted, text: str) -> None:
        for host in self._waiting.pop(wanted):
            self._problem(host, f"{host.name}: {text}")

    def _downloaded(self, wanted: Wanted, package: Package, lines: List[str]) -> None:
        hosts = self._waiting.pop(wanted)
        if lines:
            self._print(f"wheels for {', '.join(host.name for host in hosts)}: {'; '.join(lines)}")
        for host in hosts:
            self._wheels[host.index] = package
            self._agents.send(host, {"do": "use", "package": package.digest})


# -- files that come back ---------------------------------------------------------------------


class _Open(NamedTuple):
    """The file that a host is sending."""

    path: PurePosixPath  # within the host's directory
    file: PartialFile  # has no name until it is complete
    bytes: int  # received so far
    folders: ExitStack  # closes the open descriptors


class FetchedFiles:
    """The files of one job, in one directory per host; `folder` is made when the first file arrives.

    A host may be compromised, and other users may have prepared the directory: only requested files are
    written, to new files in directories of this user, and no link is followed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: Dict[str, _Open] = {}
        self._given_up: Dict[str, PurePosixPath] = {}
        self._files: Counts[str] = Counter()
        self._bytes: Counts[str] = Counter()
        self._problems: List[str] = []

    def take(self, host: str, data: bytes, patterns: Sequence[str]) -> None:
        """Write one piece of a file, a line of JSON and the bytes; ProtocolError if it was not requested."""
        line, _, piece = data.partition(b"\n")
        facts = decoded(line, _FACTS)
        path: PurePosixPath = facts["path"]
        if facts["offset"] and self._given_up.get(host) == path:
            return
        if patterns and not _is_safe(path):
            why = f"it has control characters, or more than {MAX_PARTS} components"
            self._give_up(host, path, f"{host}: {quoted(str(path)[:200])} is not taken: {why}")
            return
        if not any(_matches(path.parts, PurePosixPath(pattern).parts) for pattern in patterns):
            raise ProtocolError(f"a file {str(path)[:200]!a}, which this job does not fetch")
        if "error" in facts:
            self._give_up(host, path, f"{host}: {quoted(str(path))} could not be read: {facts['error']}")
            return
        try:
            self._write(host, path, facts["offset"], piece, facts.get("last", False))
        except OSError as problem:
            target = self._folder / _name(host) / path
            self._give_up(host, path, f"{target} could not be written: {problem.strerror}")

    def _give_up(self, host: str, path: PurePosixPath, why: str) -> None:
        self._abandon(host)
        self._given_up[host] = path
        if len(self._problems) < MAX_PROBLEMS:
            self._problems.append(why)

    def _write(self, host: str, path: PurePosixPath, offset: int, piece: bytes, last: bool) -> None:
        if not offset:
            self._abandon(host)
            self._begin(host, path)
        current = self._open.get(host)
        if current is None or (current.path, current.bytes) != (path, offset):
            raise ProtocolError(f"a piece of {str(path)[:200]!a} that does not follow the one before it")
        descriptor = current.file.descriptor
        facts = os.statvfs(descriptor)
        if self._bytes[host] + len(piece) > MAX_HOST_BYTES:
            raise OSError(0, f"{host} has sent {MAX_HOST_BYTES / 1e9:g} GB, and more is not taken")
        if facts.f_bavail * facts.f_frsize < MIN_FREE_BYTES + len(piece):
            raise OSError(0, f"less than {MIN_FREE_BYTES / 1e9:.1f} GB would be left of the file system")
        write_all(descriptor, piece)
        self._bytes[host] += len(piece)
        self._open[host] = current._replace(bytes=offset + len(piece))
        if last:
            current.file.publish()
            os.close(descriptor)
            del self._open[host]
            current.folders.close()
            self._files[host] += 1

    def _begin(self, host: str, path: PurePosixPath) -> None:
        """Open a new file, in directories that no other user can replace."""
        if self._files[host] >= MAX_HOST_FILES:
            raise OSError(0, f"{host} has sent {MAX_HOST_FILES} files, and more are not taken")
        with ExitStack() as stack:
            top = stack.enter_context(own_folder(self._folder))
            folder = stack.enter_context(inner_folder(top, "/".join((_name(host), *path.parts[:-1])), 0o777))
            file = PartialFile(folder, path.name, 0o666)
            self._open[host] = _Open(path, file, 0, stack.pop_all())

    def _abandon(self, host: str) -> None:
        """Remove the incomplete file of a host."""
        current = self._open.pop(host, None)
        if current is not None:
            self._bytes[host] -= current.bytes
            current.file.abandon()
            current.folders.close()

    def describe(self, job: Job) -> str:
        """Return lines about the files fetched from each host, and problems. Call at the end of the job."""
        for host, current in list(self._open.items()):
            self._give_up(host, current.path, f"{host}: {current.path} did not arrive completely")
        lines = []
        for name in [host.name for host in job.last_hosts if host.gets_code]:
            count, size = self._files[name], self._bytes[name]
            if count:
                text = f"fetched {count} file{'' if count == 1 else 's'}, {size / 1e6:.1f} MB, from {name}"
                lines.append(f"{text} into {self._folder / _name(name)}")
            else:
                lines.append(f"{name} sent no file that matches {' or '.join(job.fetch)}")
        return "\n".join([*lines, *self._problems])


def _name(host: str) -> str:
    """Return the directory name of a host."""
    return host.replace("/", "_")


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether a path matches as :func:`glob.glob` matches it, ``**`` included.

    >>> _matches(["out", "a", "model.pt"], ["out", "**", "*.pt"]), _matches([".ssh", "config"], ["**"])
    (True, False)
    """
    if not pattern:
        return not parts
    first, rest = pattern[0], pattern[1:]
    if first == "**":
        if _matches(parts, rest):
            return True
        return bool(parts) and not parts[0].startswith(".") and _matches(parts[1:], pattern)
    if not parts or (parts[0].startswith(".") and not first.startswith(".")):
        return False
    return fnmatch.fnmatchcase(parts[0], first) and _matches(parts[1:], rest)


def _path(value: Any) -> PurePosixPath:
    """Return a path below the directory."""
    path = PurePosixPath(text(16384)(value))
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in value:
        raise ValueError(f"the path {value[:60]!a} leaves the directory")
    os.fsencode(path)
    return path


def _is_safe(path: PurePosixPath) -> bool:
    """Return whether a path is not deep, and may be shown: a terminal executes no bytes outside of UTF-8."""
    shown = "".join(each for each in str(path) if not "\udc80" <= each <= "\udcff")
    return shown.isprintable() and len(path.parts) <= MAX_PARTS


_FACTS = fields({"path": _path, "offset": whole(0, 1 << 60)}, {"last": flag, "error": maybe(said())})
"""The head of a piece."""
