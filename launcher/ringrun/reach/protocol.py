# ruff: noqa: PTH112, PTH118, PTH119, PTH120  text, and links make environments
"""The launcher's side of the agent protocol: the agent's program, frames from a stream of bytes, and the
connection to one agent: a local process or an ssh, with three pipes.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import signal
import subprocess
import zlib
from collections import deque
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Deque, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from ringcomm.errors import ProtocolError

from ..agent import agent, framing

BOOT = (
    "import os,sys;v=sys.version_info;"
    'v>=(3,8) or sys.exit("ringrun-old-python %d.%d.%d %s"%(v[0],v[1],v[2],sys.executable));'
    '"" in sys.path and sys.path.remove("");'
    'f=os.fdopen(0,"rb",0);exec(f.readline())'
)
"""The program for ``python -c`` on every host, which executes the first line of stdin. It contains no single
quote, backslash, dollar, backtick or exclamation mark, so that sh, csh and fish leave it unchanged between
single quotes. It is also valid Python 2, to report that this version is too old."""

NOISE_LIMIT_BYTES = 1 << 20
FRAME_LIMIT_BYTES = 5 << 20
"""Above the longest record of a rank (:data:`ringrun.agent.framing.RECORD_LIMIT_BYTES`)."""


class Frame(NamedTuple):
    """One frame from an agent: ``kind`` is one of ``framing.STDOUT`` to ``framing.NUMBERS``."""

    kind: int
    rank: int
    data: bytes


@lru_cache(maxsize=None)
def program(main: ModuleType) -> bytes:
    """Return a compressed program for a host without ringcomm. `main` is run as ``__main__``; it and the
    modules of ringcomm and ringrun that it imports must need only the standard library. Their packages' code
    is not run.
    """
    files = _modules_of(main)
    parts = [name.split(".")[:-1] for name in files]
    packages = sorted({".".join(above[:count]) for above in parts for count in range(1, len(above) + 1)})
    steps = ["import sys, types"]
    steps += [f"sys.modules[{name!r}] = types.ModuleType({name!r})" for name in packages]
    for name, path in files.items():
        text, (above, _, own) = path.read_text(encoding="utf-8"), name.rpartition(".")
        file = name.replace(".", "/") + ".py"  # tracebacks show its lines if the host has ringrun
        if name == main.__name__:
            steps.append(f"exec(compile({text!r}, {file!r}, 'exec'))")
            continue
        steps.append(f"module = sys.modules[{name!r}] = types.ModuleType({name!r})")
        steps.append(f"module.__package__ = {above!r}")
        steps.append(f"exec(compile({text!r}, {file!r}, 'exec'), module.__dict__)")
        steps.append(f"sys.modules[{above!r}].{own} = module")
    return zlib.compress("\n".join(steps).encode(), 9)


def _modules_of(main: ModuleType) -> Dict[str, Path]:
    """Return the files of a module and of its imports outside of functions, in an order for importing."""
    found: Dict[str, Path] = {}

    def add(name: str) -> None:
        spec = None if name in found else find_spec(name)
        if spec is None or spec.origin is None or spec.submodule_search_locations is not None:
            return
        path = Path(spec.origin)
        for imported in _imports(ast.parse(path.read_text(encoding="utf-8")), name):
            add(imported)
        found[name] = path

    add(main.__name__)
    return found


def _imports(tree: ast.Module, name: str) -> Iterator[str]:
    """Yield the modules of ringcomm and ringrun that a module imports at import time."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            above = name.split(".")[: -node.level] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            if module.split(".")[0] in ("ringcomm", "ringrun"):
                spec = find_spec(module)
                is_package = spec is not None and spec.submodule_search_locations is not None
                yield from (f"{module}.{item.name}" for item in node.names) if is_package else (module,)


def with_reader(program: bytes) -> bytes:
    """Return a compressed program after a line that reads and runs it: the first data for its stdin."""
    loop = (
        f"import os, zlib\ntext = b''\nwhile len(text) < {len(program)}:\n"
        f"    piece = os.read(0, {len(program)} - len(text))\n"
        "    if not piece:\n        raise SystemExit\n    text += piece\nexec(zlib.decompress(text))"
    )
    return f"exec({loop!r})\n".encode() + program


class FrameReader:
    """Parses an agent's output into frames; `noise` is a login shell's output before the marker."""

    def __init__(self) -> None:
        self.noise = bytearray()
        self.started = False
        self._buffer = bytearray(b"\n")  # the marker starts with a line end; the first line may be the marker

    def feed(self, data: bytes) -> List[Frame]:
        """Return all frames that are complete now; ProtocolError for an invalid one."""
        self._buffer += data
        if not self.started and not self._find_marker():
            return []
        frames: List[Frame] = []
        header, position = framing.TO_LAUNCHER, 0
        while len(self._buffer) - position >= header.size:
            kind, rank, length = header.unpack_from(self._buffer, position)
            if not framing.STDOUT <= kind <= framing.NUMBERS or length > FRAME_LIMIT_BYTES:
                raise ProtocolError(f"an invalid frame of kind {kind} and {length} bytes")
            end = position + header.size + length
            if len(self._buffer) < end + len(framing.FRAME_END):
                break
            frames.append(Frame(kind, rank, bytes(self._buffer[position + header.size : end])))
            position = end + len(framing.FRAME_END)
            if self._buffer[end:position] != framing.FRAME_END:
                raise ProtocolError(f"a frame of kind {kind} and {length} bytes that does not end there")
        del self._buffer[:position]
        return frames

    def _find_marker(self) -> bool:
        noise, marker, rest = self._buffer.partition(framing.MARKER)
        self.started, self.noise = bool(marker), noise[1:4097]
        if self.started:
            self._buffer = rest
        elif len(noise) > NOISE_LIMIT_BYTES:
            raise ProtocolError("1 MiB of output without the agent's first line")
        return self.started


# -- this machine's environment on a host ------------------------------------------------------------
# A host may have another home, user or folder of conda. So before ``python3`` is used there, ringrun searches
# for the interpreter's environment: a virtual environment at the same path below the home, or one of conda by
# its name.

CONDAS = ("miniconda3", "miniforge3", "mambaforge", "anaconda3", "micromamba", ".conda")
"""The folders that installers of conda make in the home. Those in ``/opt`` have no dot."""
_ROOTS = (*(f"~/{name}" for name in CONDAS), "/opt/conda", *(f"/opt/{name}" for name in CONDAS[:-1]))

_FINDER = """
import os
found = {candidates!r}
try:
    with open(os.path.expanduser("~/.conda/environments.txt")) as file:
        paths = [line.strip() for line in file.read(1 << 20).splitlines()]
    paths = [path for path in paths if {name!r} and os.path.basename(path) == {name!r}]
    found += [os.path.join(path, {inside!r}) for path in paths]
except (OSError, ValueError):
    pass
for path in map(os.path.expanduser, found):
    if os.path.isabs(path) and os.access(path, os.X_OK) and not os.path.isdir(path):
        os.execv(path, [path, "-c", {boot!r}])
exec(f.readline())
"""


def finder(python: str, home: str) -> bytes:
    """Return a line for :data:`BOOT` that changes to the environment's interpreter, or b""."""
    found, (name, inside) = candidates(python, home), conda_name(python)
    text = _FINDER.format(candidates=found, name=name, inside=inside, boot=BOOT)
    return f"exec({text!r})\n".encode() if found else b""


def candidates(python: str, home: str) -> List[str]:
    """Return the possible paths of the interpreter on another host; ``~`` is the home there."""
    found: List[str] = []
    if home != "/" and python.startswith(home.rstrip("/") + "/"):
        found.append("~/" + python[len(home.rstrip("/")) + 1 :])
    name, inside = conda_name(python)
    if inside:
        middle = f"envs/{name}/" if name else ""
        found += [f"{root}/{middle}{inside}" for root in _ROOTS]
    return [path for path in found if path != python]


def conda_name(python: str) -> Tuple[str, str]:
    """Return the name of an interpreter's conda environment ("": the base) and its path in it; or two ""."""
    prefix, binary = os.path.split(os.path.dirname(python))
    if binary != "bin" or not os.path.isdir(os.path.join(prefix, "conda-meta")):
        return "", ""
    above, name = os.path.split(prefix)
    inside = f"bin/{os.path.basename(python)}"
    return (name if os.path.basename(above) == "envs" else ""), inside


# -- the connection to an agent ------------------------------------------------------------------

STDERR_LIMIT_BYTES = 16 * 1024
Process = Any
"""A :class:`LocalProcess`, or what has its pipes, and ``poll``, ``wait`` and ``kill``."""


class LocalProcess(subprocess.Popen):  # type: ignore[type-arg]  # no class with parameters in Python 3.8
    """A process of this machine with three pipes."""

    def __init__(self, argv: Sequence[str]) -> None:
        pipe = subprocess.PIPE
        # In a separate session the agent does not get the terminal's Ctrl-C: the supervisor ends the job.
        super().__init__(argv, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        super().kill()


class AgentLink:
    """Starts an agent by `spawn`, sends it commands without blocking, and parses its output into frames.
    `argv` and `first`, the input before the agent's program, may be changed before another start.
    """

    def __init__(
        self, argv: Sequence[str], spawn: Callable[[Sequence[str]], Process] = LocalProcess
    ) -> None:
        self.argv, self.first, self._spawn = list(argv), b"", spawn
        self.attempt = 0
        self.process: Process = None
        self.alive = False
        self._reset()

    def _reset(self) -> None:
        self._reader = FrameReader()
        self._outgoing: Deque[memoryview] = deque()
        self._stderr = bytearray()

    def start(self, config: Dict[str, Any], payload: Optional[bytes]) -> None:
        """Start the agent (again) and queue its program, its configuration and the payload."""
        self.launch(with_reader(program(agent)))
        self.send(config)
        if payload is not None:
            self.send_frame(framing.PAYLOAD, payload)

    def launch(self, first: bytes) -> None:
        """Start the command line (again) and queue the program for its interpreter. It raises OSError."""
        self._reset()
        self.attempt += 1
        self.process = self._spawn(self.argv)
        for name in ("stdin", "stdout", "stderr"):
            os.set_blocking(self.descriptor(name), False)
        self.alive = True
        self.put(self.first + first)

    @property
    def answered(self) -> bool:
        return self._reader.started

    @property
    def at_end(self) -> bool:
        """Whether its stdout has ended."""
        return not self.alive

    @property
    def stderr_text(self) -> str:
        """The last 16 KiB that the process wrote to stderr."""
        return self._stderr.decode("utf-8", "replace")

    @property
    def noise(self) -> str:
        """The output before the agent's marker."""
        return self._reader.noise.decode("utf-8", "replace")

    def descriptor(self, name: str) -> int:
        """Return the descriptor of ``stdin``, ``stdout`` or ``stderr``; -1 after it is closed."""
        stream = getattr(self.process, name, None)
        return -1 if stream is None or stream.closed else int(stream.fileno())

    def put(self, data: bytes) -> None:
        """Queue bytes; they are dropped if stdin is closed."""
        if self.descriptor("stdin") >= 0:
            self._outgoing.append(memoryview(data))

    def send(self, command: Dict[str, Any]) -> None:
        self.send_frame(framing.JSON, json.dumps(command).encode())

    def send_frame(self, kind: int, data: bytes) -> None:
        """Queue a frame of a kind of :mod:`ringrun.agent.framing`."""
        self.put(framing.TO_AGENT.pack(kind, len(data)))
        self.put(data)

    @property
    def has_outgoing(self) -> bool:
        """Whether data is queued for the agent's stdin."""
        return bool(self._outgoing) and self.descriptor("stdin") >= 0

    @property
    def outgoing_bytes(self) -> int:
        return sum(map(len, self._outgoing))

    def write(self) -> None:
        """Write queued data without blocking. :meth:`read` reports that the agent has ended."""
        while self.has_outgoing:
            try:
                written = os.write(self.descriptor("stdin"), self._outgoing[0][: 1 << 20])
            except BlockingIOError:
                return
            except OSError:
                self._outgoing.clear()  # the event loop still watches the descriptor, and closes it later
                return
            rest = self._outgoing.popleft()[written:]
            if rest:
                self._outgoing.appendleft(rest)

    def read(self) -> List[Frame]:
        """Return the complete frames received; ``alive`` becomes False at the end of stdout."""
        try:
            data = os.read(self.descriptor("stdout"), 1 << 18)
        except BlockingIOError:
            return []
        self.alive = bool(data)
        return self._reader.feed(data)

    def read_stderr(self) -> bytes:
        """Read from stderr of ssh or the agent, and keep the last 16 KiB; b"" at the end."""
        try:
            data = os.read(self.descriptor("stderr"), 1 << 16)
        except BlockingIOError:
            return b""
        self._stderr += data
        del self._stderr[:-STDERR_LIMIT_BYTES]
        if not data:
            self.process.stderr.close()
        return data

    def drain_stderr(self) -> None:
        """Read all data that is available on stderr."""
        while self.descriptor("stderr") >= 0 and self.read_stderr():
            pass

    def poll(self) -> Optional[int]:
        """Return the process's exit status; None if it runs or was never started."""
        return None if self.process is None else self.process.poll()

    def close_stdin(self) -> None:
        """Close the agent's stdin, upon which it ends all its ranks and exits."""
        self._outgoing.clear()
        self._close("stdin")

    def _close(self, name: str) -> None:
        if self.descriptor(name) >= 0:
            with contextlib.suppress(OSError):
                getattr(self.process, name).close()

    def kill(self) -> None:
        """SIGKILL the process group of the agent, or of the ssh to it."""
        self.close_stdin()
        if self.process is not None and self.process.poll() is None:
            self.process.kill()

    def close(self) -> None:
        """Wait for the process, which has ended or been killed, and close the pipes."""
        self.alive = False
        if self.process is not None:
            try:
                self.process.wait(1.0)
            except subprocess.TimeoutExpired:
                self.kill()
                self.process.wait()
            for name in ("stdin", "stdout", "stderr"):
                self._close(name)
