"""The documentation site builds without warnings, and its reference has every public name.

``SITE=DIR`` checks a site that has been built already; otherwise the test builds one with ``.venv-docs``,
which ``bash tests/run.sh --only docs`` makes.
"""

from __future__ import annotations

import os
import re
import subprocess
import zlib
from pathlib import Path

import pytest

from tests.public_names import ROOT, public_names

MODULES = ("ringcomm", "ringcomm.torch", "ringcomm.torch.distributed", "ringcomm.tensorflow",
           "ringcomm.keras", "ringcomm.mxnet", "ringcomm.jax", "ringcomm.mlx", "ringcomm.dask",
           "ringcomm.spark")  # fmt: skip

pytestmark = pytest.mark.release


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a built site."""
    if "SITE" in os.environ:
        return Path(os.environ["SITE"])
    mkdocs = ROOT / ".venv-docs" / "bin" / "mkdocs"
    if not mkdocs.exists():
        pytest.skip("there is no .venv-docs: bash tests/run.sh --only docs makes it")
    folder = tmp_path_factory.mktemp("site")
    command = [str(mkdocs), "build", "--strict", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    # The site's inventory has Sphinx' format: four lines of head, then compressed lines.
    inventory = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    listed = {line.split(" ")[0] for line in inventory.splitlines()}
    names = {f"{module}.{name}" for module in MODULES for name in public_names(module)}
    errors = (ROOT / "ringcomm" / "errors.py").read_text()
    names |= {f"ringcomm.errors.{name}" for name in re.findall(r"^class ([A-Z]\w+)", errors, re.MULTILINE)}
    assert sorted(names - listed) == []


def test_docstrings_are_shown_without_markup(site: Path) -> None:
    left = {}
    for page in sorted((site / "api").glob("*.html")):
        text = re.sub(r"<[^>]+>", "", page.read_text())
        found = re.findall(r":(?:attr|class|data|exc|func|meth|mod):.{30}|\{\w+\}\n|^\s*::?$", text, re.M)
        left.update({page.name: found} if found else {})
    assert left == {}
