"""Packages have an order, modules inside a package none; some things are done in one package alone."""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path
from typing import Dict, Iterator, List, Set

ROOT = Path(__file__).resolve().parents[1]

ORDER = """
version errors ops dtypes clock docstrings
storage configuration config newkey
wire codec schedule
transport
group collective arrays engine rendezvous calls job api
balance elastic _adapter
torch jax mlx mxnet
keras tensorflow lightning ray dask spark testing
ringcomm
ringrun.plan ringrun.agent ringrun.elastic
ringrun.reach ringrun.diagnosis ringrun.show
ringrun.job ringrun.join
ringrun.doctor ringrun
"""
"""A package, or a module beside packages, imports from its line and those above (in functions from any)."""

FRAMEWORKS = {"tensorflow", "keras", "jax", "mlx", "mxnet", "torch", "cupy", "lightning", "ray"}
FRAMEWORKS |= {"distributed", "pyspark"}
TRANSLATES = {"dask": "distributed", "spark": "pyspark", "lightning": "torch"}
TRANSLATES["ringrun"] = "torch"  # the entry point by which PyTorch finds the backend
"""The framework of an adapter, where its name differs from the package's."""


def modules() -> Dict[str, ast.Module]:
    """Every module of ringcomm and ringrun by its full name, without the stand-ins for Horovod's modules."""
    paths = {path: path.relative_to(ROOT) for path in (ROOT / "ringcomm").rglob("*.py")}
    launcher = ROOT / "launcher"
    paths.update((path, path.relative_to(launcher)) for path in (launcher / "ringrun").rglob("*.py"))
    return {
        ".".join(name.with_suffix("").parts).replace(".__init__", ""): ast.parse(path.read_text())
        for path, name in paths.items()
        if "compat" not in name.parts
    }


MODULES = modules()


def place(module: str) -> str:
    """Return the name of ``ORDER`` that a module belongs to."""
    top, *rest = module.split(".")
    if top == "ringcomm":
        return rest[0] if rest else top
    full = ".".join([top, *rest[:1]])
    return full if f" {full} " in f" {' '.join(ORDER.split())} " else top


@lru_cache(maxsize=None)
def imported(name: str, lazily: bool = True) -> Set[str]:
    """Full names that a module imports; without those inside functions if not ``lazily``."""
    return set(_imported(name, lazily))


def _imported(name: str, lazily: bool) -> Iterator[str]:
    left: List[ast.AST] = [MODULES[name]]
    source = ROOT / ("ringcomm" if name.startswith("ringcomm") else "launcher/ringrun")
    is_package = source.joinpath(*name.split(".")[1:], "__init__.py").exists()
    package = name if is_package else name.rpartition(".")[0]
    while left:
        node = left.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")
            base = above[: len(above) - node.level + 1] if node.level else []
            origin = ".".join([*base, node.module] if node.module else base)
            for alias in node.names:
                full = f"{origin}.{alias.name}"
                yield full if full in MODULES else origin
        elif lazily or not (_is_typing(node) or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))):
            left.extend(ast.iter_child_nodes(node))


def _is_typing(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def where(found: Set[str]) -> Set[str]:
    return {place(name) for name in found}


def test_packages_import_from_above_in_the_order() -> None:
    line = {name: number for number, names in enumerate(ORDER.split("\n")) for name in names.split()}
    assert sorted(where(set(MODULES)) - set(line)) == [], "a new package gets its place in ORDER"
    edges = {
        (place(name), place(other))
        for name in MODULES
        for other in imported(name, lazily=False)
        if other.split(".")[0] in ("ringcomm", "ringrun")
    }
    assert sorted((one, other) for one, other in edges if line[other] > line[one]) == []


def test_ringcomm_does_not_import_the_launcher() -> None:
    found = {(name, other) for name in MODULES if name.startswith("ringcomm") for other in imported(name)}
    assert {name for name, other in found if other.split(".")[0] == "ringrun"} == set()


def test_a_framework_is_imported_by_its_own_adapter_one_in_a_module() -> None:
    for name in MODULES:
        found = {other.split(".")[0] for other in imported(name)} & FRAMEWORKS
        own = place(name)
        assert len(found) <= 1 or own.startswith("ringrun"), name
        assert found <= {TRANSLATES.get(own, own)} | ({"torch", "jax"} if own == "keras" else set()), name


def test_the_environment_is_read_by_the_configuration_alone() -> None:
    found = {
        name
        for name, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    }
    found = {name for name in found if name.startswith("ringcomm")}
    assert where(found) == {"configuration"}


def test_pickles_are_read_where_they_are_signed_or_the_users() -> None:
    own = [name for name in MODULES if name.startswith("ringcomm")]
    found = {name for name in own for other in imported(name) if "pickle" in other}
    assert where(found) == {"calls"}


def test_the_library_does_not_print_exit_or_configure() -> None:
    programs = {"ringcomm.config", "ringcomm.newkey", "ringcomm.rendezvous.__main__"}
    calls = {"print", "exit", "sys.exit", "os._exit", "signal.signal", "logging.basicConfig"}
    for name, tree in MODULES.items():
        if name.startswith("ringcomm") and name not in programs:
            called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
            assert called & calls == set(), name
