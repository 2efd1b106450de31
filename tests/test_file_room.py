"""Files and folders are opened, made and removed by ``storage.folders`` and ``storage.files`` alone."""

from __future__ import annotations

import ast
from typing import Dict, Iterator, List, Tuple

import pytest

from tests.test_layers import LAUNCHER, PACKAGE, ROOT, nodes

ROOM = ("ringcomm/storage/folders.py", "ringcomm/storage/files.py")
OPENED_THERE = ("open_named", "open_at", "new_file")
"""Functions of the room that return a descriptor, of which ``open`` makes a file."""
OS = {
    "open", "mkdir", "makedirs", "unlink", "remove", "removedirs", "rename", "renames", "replace", "rmdir",
    "link", "symlink", "chmod", "chown", "truncate", "utime", "mkfifo", "mknod", "listdir", "scandir", "walk",
    "readlink",
}  # fmt: skip
PATHS = {
    "mkdir", "touch", "write_text", "write_bytes", "read_text", "read_bytes", "unlink", "rmdir", "rename",
    "symlink_to", "hardlink_to", "chmod", "iterdir", "glob", "rglob",
}  # fmt: skip
"""Methods of paths. ``replace`` counts with one argument, which that of texts does not have."""
OTHERS = ("os", "files", "folders", "formatter")
"""Names whose methods of the same name are counted above, are the room's, or write a help page."""

SYSTEM = "files of the kernel and of the system, which only the administrator makes"
DESCRIPTOR = "a descriptor that was inherited, or that the room has opened"
NAMED = "input that the user names or has installed: neither code that is sent on unseen, nor a key"
UNNAMED = "temporary file without a name"
ALLOWED: Dict[str, Tuple[str, List[str]]] = {
    "launcher/ringrun/agent/agent.py": (SYSTEM, ["os.open"]),
    "launcher/ringrun/agent/binding.py": (SYSTEM, ["open"]),
    "launcher/ringrun/agent/cleaning.py": (DESCRIPTOR, ["os.listdir", "tempfile.gettempdir"]),
    "launcher/ringrun/agent/job_folder.py": (
        "looks for names in the job's own folder, and opens what it finds by descriptors",
        ["glob.escape", "glob.glob", "open"],
    ),
    "launcher/ringrun/agent/processes.py": (SYSTEM, ["open", "os.listdir", "os.open"]),
    "launcher/ringrun/agent/recorders.py": (SYSTEM, ["open", "os.listdir"]),
    "launcher/ringrun/agent/shipped.py": (DESCRIPTOR, ["os.listdir"]),
    "launcher/ringrun/agent/terminal.py": (SYSTEM, ["os.open"]),
    "launcher/ringrun/agent/threads.py": (SYSTEM, ["open"]),
    "launcher/ringrun/agent/worker.py": (DESCRIPTOR, ["open"]),
    "launcher/ringrun/cli.py": (
        "the system's, and the user's script, which the ranks run in any case", [".read_text", "open"],
    ),
    "launcher/ringrun/compat/horovod_shim/horovod/runner/common/util/hosts.py": (NAMED, [".read_text"]),
    "launcher/ringrun/diagnosis/records.py": (
        "looks for names that it then opens by the room, and lists an opened folder",
        [".glob", "os.listdir", "tempfile.gettempdir"],
    ),
    "launcher/ringrun/doctor/facts.py": (SYSTEM, ["open", "os.listdir"]),
    "launcher/ringrun/job/control_socket.py": (
        "a socket, which has no descriptor to open it by; its folder is opened and checked",
        [".iterdir", ".unlink"],
    ),
    "launcher/ringrun/job/discovery.py": (UNNAMED, ["tempfile.TemporaryFile"]),
    "launcher/ringrun/reach/doors.py": (NAMED, [".read_text"]),
    "launcher/ringrun/reach/named_hosts.py": (
        "looks for names that it then opens by the room", ["glob.glob"],
    ),
    "launcher/ringrun/reach/origin.py": (NAMED, [".read_text"]),
    "launcher/ringrun/reach/protocol.py": (NAMED, [".read_text"]),
    "launcher/ringrun/ship/package.py": (NAMED, [".read_bytes", ".rglob"]),
    "launcher/ringrun/ship/source_tree.py": (NAMED, [".read_bytes", ".read_text", "os.walk"]),
    "ringcomm/engine/stacks.py": (UNNAMED, ["tempfile.TemporaryFile"]),
    "ringcomm/job/flight_recorder.py": (SYSTEM, [".read_text"]),
    "ringcomm/configuration/polling.py": (SYSTEM, ["open"]),
    "ringcomm/job/program.py": (NAMED, [".read_bytes"]),
    "ringcomm/rendezvous/launched.py": ("a network file system asks its server anew then", [".iterdir"]),
    "ringcomm/transport/huge_pages.py": (SYSTEM, [".read_text"]),
    "ringcomm/transport/kinds.py": (SYSTEM, [".iterdir", ".read_text"]),
    "ringcomm/transport/nics.py": (SYSTEM, [".read_text", "os.readlink"]),
    "ringcomm/transport/ring.py": ("shared memory without a name", ["os.open"]),
    "ringcomm/transport/tls.py": (
        "memory without a name; where the system has none, a fresh folder of this user alone",
        [".touch", ".write_text", "open", "tempfile.TemporaryDirectory"],
    ),
}
"""By file: why it opens paths itself, and by which calls."""


def calls(tree: List[ast.AST]) -> Iterator[str]:
    """The calls in a file that open, make, list, change or remove a file or folder by its path."""
    for node in tree:
        if not isinstance(node, ast.Call):
            continue
        # Relative to an opened folder, which only the room opens.
        if {keyword.arg for keyword in node.keywords} & {"dir_fd", "src_dir_fd"}:
            continue
        called = node.func
        if isinstance(called, ast.Name) and called.id == "open":
            first = node.args[0]
            if not (isinstance(first, ast.Call) and _last(first.func) in OPENED_THERE):
                yield "open"
        elif isinstance(called, ast.Attribute):
            owner = called.value.id if isinstance(called.value, ast.Name) else ""
            if (owner == "os" and called.attr in OS) or owner in ("tempfile", "glob"):
                yield f"{owner}.{called.attr}"
            elif owner == "shutil" and called.attr != "which":
                yield f"shutil.{called.attr}"
            elif owner not in OTHERS and _is_of_a_path(called.attr, node):
                yield f".{called.attr}"


def _is_of_a_path(name: str, call: ast.Call) -> bool:
    return name in PATHS or (name == "replace" and len(call.args) == 1 and not call.keywords)


def _last(called: ast.expr) -> str:
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


def product_files() -> List[str]:
    """Every module of ringcomm and ringrun outside of the room."""
    paths = [*PACKAGE.rglob("*.py"), *LAUNCHER.rglob("*.py")]
    return sorted({str(path.relative_to(ROOT)) for path in paths} - set(ROOM))


def test_nothing_opens_a_path_outside_of_the_room() -> None:
    found = {name: sorted(set(calls(nodes(ROOT / name)))) for name in product_files()}
    allowed = {name: names for name, (_, names) in ALLOWED.items()}
    assert {name: names for name, names in found.items() if names} == allowed, "use ringcomm.storage.files"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("open(path)", ["open"]),
        ("open(open_named(path), 'w')", []),
        ("os.open(name, flags)", ["os.open"]),
        ("os.open(name, flags, dir_fd=folder)", []),
        ("os.rename(a, b, src_dir_fd=x, dst_dir_fd=y)", []),
        ("os.rename(a, b)", ["os.rename"]),
        ("shutil.rmtree(path)", ["shutil.rmtree"]),
        ("shutil.which('git')", []),
        ("Path(p).mkdir()", [".mkdir"]),
        ("path.replace(other)", [".replace"]),
        ("text.replace('a', 'b')", []),
        ("tempfile.mkdtemp()", ["tempfile.mkdtemp"]),
        ("path.write_text('')", [".write_text"]),
        ("formatter.write_text('')", []),
        ("files.write_file(folder, name, data)", []),
    ],
)
def test_what_counts(line: str, found: List[str]) -> None:
    assert list(calls(list(ast.walk(ast.parse(line))))) == found
