"""The documentation site builds without warnings, and has every public name, every page and a search index.

``SITE=DIR`` checks a site that has been built already; otherwise the test builds one, if mkdocs is installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Set

import pytest

from tests.public_names import ROOT, public_names

MODULES = ("ringcomm", "ringcomm.torch", "ringcomm.torch.distributed", "ringcomm.tensorflow",
           "ringcomm.keras", "ringcomm.mxnet", "ringcomm.jax", "ringcomm.mlx", "ringcomm.dask",
           "ringcomm.spark")  # fmt: skip

pytestmark = pytest.mark.release


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a built site."""
    if "SITE" in os.environ:
        return Path(os.environ["SITE"])
    python = ROOT / ".venv-docs" / "bin" / "python"
    if importlib.util.find_spec("mkdocs") and importlib.util.find_spec("mkdocstrings"):
        python = Path(sys.executable)
    if not python.exists():
        pytest.skip("mkdocs is not installed, and there is no .venv-docs (python -m docs makes it)")
    folder = tmp_path_factory.mktemp("site")
    command = [str(python), "-m", "docs", "--output", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def names_in_reference(site: Path) -> Set[str]:
    """The names in the site's inventory (Sphinx' format: four lines of head, then compressed lines)."""
    head_and_body = (site / "objects.inv").read_bytes().split(b"\n", 4)
    lines = zlib.decompress(head_and_body[4]).decode().splitlines()
    return {line.split(" ")[0] for line in lines}


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_in_the_reference(site: Path, module: str) -> None:
    listed = names_in_reference(site)
    names = public_names(module)
    assert names
    assert sorted(name for name in names if f"{module}.{name}" not in listed) == []


def test_every_exception_is_in_the_reference(site: Path) -> None:
    classes = re.findall(r"^class ([A-Z]\w+)", (ROOT / "ringcomm" / "errors.py").read_text(), re.MULTILINE)
    assert sorted({f"ringcomm.errors.{name}" for name in classes} - names_in_reference(site)) == []


def test_every_page_can_be_searched(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    found = {entry["location"].split("#")[0] for entry in index["docs"]}
    pages = {f"docs/{page.stem}.html" for page in (ROOT / "docs").glob("*.md")}
    pages |= {f"api/{module}.html" for module in MODULES}
    pages |= {"SECURITY.html", "CONTRIBUTING.html", "CHANGELOG.html"}
    assert sorted(pages - found) == []
    assert [entry for entry in index["docs"] if "allreduce" in entry["text"]]


@pytest.mark.parametrize("words", ["NCCL_SOCKET_IFNAME", "torchrun", "MASTER_ADDR", "World size"])
def test_what_users_of_torchrun_search_for_is_in_a_title(site: Path, words: str) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    titles = {entry["location"].split("#")[0] for entry in index["docs"] if words in entry["title"]}
    assert "docs/from_torchrun.html" in titles


def test_the_reference_begins_with_what_programs_call_first(site: Path) -> None:
    text = (site / "api" / "ringcomm.html").read_text()
    order = [text.index(f'id="ringcomm.{name}"') for name in ("init", "rank", "size", "allreduce", "Sum")]
    assert order == sorted(order)
    torch = (site / "api" / "ringcomm.torch.html").read_text()
    names = ("init", "rank", "DistributedOptimizer", "allreduce", "Sum")
    order = [torch.index(f'id="ringcomm.torch.{name}"') for name in names]
    assert order == sorted(order)
    for page in (site / "api").glob("*.html"):
        assert not re.search(r"<p>\s*:+\s*</p>", page.read_text()), page.name
    pages = {page.stem for page in (site / "api").glob("*.html")}
    assert pages >= {"ringcomm.elastic", "LocalSGD", "rc.run"}


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.stem)
def test_a_page_soon_shows_something(page: Path) -> None:
    """At most two screens of text come before the first block of code, table or picture."""
    before = re.split(r"^(?: *```|\||!\[)", page.read_text(), maxsplit=1, flags=re.MULTILINE)
    assert len(before) == 2 and len(before[0]) < 3000  # characters, of which a screen of 1280 x 900 has 1500


def test_docstrings_are_shown_without_markup(site: Path) -> None:
    left = {}
    for page in sorted((site / "api").glob("*.html")):
        text = re.sub(r"<[^>]+>", "", page.read_text())
        found = re.findall(r":(?:attr|class|data|exc|func|meth|mod):.{30}|\{\w+\}\n", text)
        left.update({page.name: found} if found else {})
    assert left == {}


def test_links_and_pictures_lead_somewhere(site: Path) -> None:
    broken = []
    for page in site.rglob("*.html"):
        if page.name == "404.html" or "source" in page.relative_to(site).parts:
            continue
        for link in re.findall(r'(?:href|src)="([^"#?]+)', page.read_text()):
            if not re.match(r"[a-z]+:", link) and not (page.parent / link).exists():
                broken.append(f"{page.relative_to(site)}: {link}")
    assert broken == []
