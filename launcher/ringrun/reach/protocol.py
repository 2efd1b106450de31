"""The launcher's side of the agent protocol. Pure: the agent's program, and frames from a stream of bytes."""

from __future__ import annotations

import ast
import zlib
from functools import lru_cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Dict, Iterator, List, Mapping, NamedTuple

from ringcomm.errors import ProtocolError
from ringcomm.storage import files, folders

from ..agent import agent, checks, framing, processes, shipped

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


@lru_cache(maxsize=1)
def agent_program() -> bytes:
    """Return the agent's compressed program."""
    modules = (folders, files, processes, framing, shipped, checks, agent)
    return compressed_program({item.__name__: Path(str(item.__file__)) for item in modules})


@lru_cache(maxsize=None)
def program_source(main: ModuleType) -> bytes:
    """Return a program for a host without ringcomm, as the first data for its stdin. `main` is run as
    ``__main__``; it and the modules of ringcomm and ringrun that it imports must need only the standard
    library. Their packages' code is not run.
    """
    return with_reader(compressed_program(modules_of(main)))


def compressed_program(files: Mapping[str, Path]) -> bytes:
    """Return modules, in the order of their imports, as one compressed program that runs the last one."""
    parts = [name.split(".")[:-1] for name in files]
    packages = sorted({".".join(above[:count]) for above in parts for count in range(1, len(above) + 1)})
    steps = ["import sys, types"]
    steps += [f"sys.modules[{name!r}] = types.ModuleType({name!r})" for name in packages]
    for name, path in files.items():
        text, file, (above, _, own) = path.read_text(encoding="utf-8"), _file(name), name.rpartition(".")
        if name == next(reversed(list(files))):
            steps.append(f"exec(compile({text!r}, {file!r}, 'exec'))")
            continue
        steps.append(f"module = sys.modules[{name!r}] = types.ModuleType({name!r})")
        steps.append(f"module.__package__ = {above!r}")
        steps.append(f"exec(compile({text!r}, {file!r}, 'exec'), module.__dict__)")
        steps.append(f"sys.modules[{above!r}].{own} = module")
    return zlib.compress("\n".join(steps).encode(), 9)


@lru_cache(maxsize=None)
def modules_of(main: ModuleType) -> Dict[str, Path]:
    """Return the files of a module and of its imports from ringcomm and ringrun, in an order for importing.

    Imports within functions do not count: a host may not need or have them.
    """
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
                is_package = (find_spec(module) or _NO_SPEC).submodule_search_locations is not None
                yield from (f"{module}.{item.name}" for item in node.names) if is_package else (module,)


_NO_SPEC = ModuleSpec("", None)


def with_reader(program: bytes) -> bytes:
    """Return a compressed program after a line that reads and runs it."""
    loop = (
        f"import os, zlib\ntext = b''\nwhile len(text) < {len(program)}:\n"
        f"    piece = os.read(0, {len(program)} - len(text))\n"
        "    if not piece:\n        raise SystemExit\n    text += piece\nexec(zlib.decompress(text))"
    )
    return f"exec({loop!r})\n".encode() + program


def _file(name: str) -> str:
    """Return the file name for tracebacks on the host, which show the source line if the host has ringrun."""
    return name.replace(".", "/") + ".py"


class FrameReader:
    """Parses an agent's output into frames. `noise` is a login shell's output before the marker, after which
    `started` is set.
    """

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
        header = framing.TO_LAUNCHER
        position = 0
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
        at = self._buffer.find(framing.MARKER)
        if at < 0:
            if len(self._buffer) > NOISE_LIMIT_BYTES:
                raise ProtocolError("1 MiB of output without the agent's first line")
            self.noise[:] = self._buffer[1:4097]
            return False
        self.noise[:] = self._buffer[1:at][:4096]
        del self._buffer[: at + len(framing.MARKER)]
        self.started = True
        return True
