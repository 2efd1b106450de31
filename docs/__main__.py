"""Builds the documentation site from a checkout: ``python -m docs [--output DIR]``. Warnings are errors.

``docs/requirements.txt`` lists the packages that it requires; if they are not installed, they are installed
into a virtual environment (``.venv-docs``) first. The pages are README.md, CHANGELOG.md, SECURITY.md,
CONTRIBUTING.md and ``docs/*.md``, in the order of :data:`PAGES`, and an API reference from docstrings
(:mod:`docs.reference`). Files of the repository that pages link to are copied, so that every link can be
checked.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Dict, List, Set

from .reference import write_reference

ROOT = Path(__file__).resolve().parents[1]

PAGES = {
    "Start": ["README.md", "docs/trouble.md"],
    "Tutorials": [
        "docs/tutorial_boards.md", "docs/tutorial_machines.md", "docs/tutorial_slow_network.md",
        "docs/tutorial_elastic.md",
    ],
    "How-to (machines)": [
        "docs/machines.md", "docs/join.md", "docs/doctor.md", "docs/watching.md", "docs/schedulers.md",
        "docs/containers.md", "docs/elastic.md", "docs/unequal.md", "docs/compression.md", "docs/scaling.md",
        "docs/gpu.md",
    ],
    "How-to (programs)": [
        "docs/collectives.md", "docs/horovod.md", "docs/torch_distributed.md", "docs/trainers.md",
        "docs/larger_models.md", "docs/tensorflow.md", "docs/jax.md", "docs/mxnet.md",
        "docs/ray_dask_spark.md",
    ],
    "How-to (coming from)": [
        "docs/from_torchrun.md", "docs/from_mpirun.md", "docs/from_accelerate.md", "docs/from_mlx.md",
    ],
    "Reference": [
        "docs/ringrun.md", "docs/configuration.md", "docs/protocol.md", "docs/stability.md", "CHANGELOG.md",
    ],
    "Explanation": [
        "docs/architecture.md", "docs/architecture_collectives.md", "docs/architecture_jobs.md",
        "docs/reliability.md", "docs/performance.md", "SECURITY.md",
    ],
    "Project": ["CONTRIBUTING.md", "benchmarks/README.md"],
}
"""The site's sections; every page of ``docs/`` is in one of them."""

CONFIG = """
site_name: ringcomm
docs_dir: {pages}
site_dir: {site}
use_directory_urls: false
strict: true
theme:
  name: material
  font: false
  features: [navigation.indexes, navigation.top, content.code.copy, search.highlight]
validation:
  links: {{not_found: warn, anchors: warn, absolute_links: warn, unrecognized_links: warn}}
  nav: {{omitted_files: ignore, not_found: warn}}
extra_css: [site.css]
markdown_extensions:
  - admonition
  - tables
  - toc: {{permalink: true, toc_depth: 3}}
  - pymdownx.highlight
  - pymdownx.superfences
plugins:
  - search
  - mkdocstrings:
      handlers:
        python:
          paths: [{root}]
          options:
            docstring_style: google
            show_root_heading: true
            show_root_full_path: true
            show_source: false
            show_if_no_docstring: true
            members_order: alphabetical
            merge_init_into_class: true
            show_labels: false
            show_bases: false
            line_length: 70
            docstring_section_style: list
            separate_signature: true
            show_signature_annotations: true
            show_submodules: false
            filters: public
            extensions: [{root}/docs/composed.py]
nav:
{nav}
"""

_LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)]*)?(\))")


def main() -> int:
    """Build the site; the exit code is that of the generator."""
    parser = argparse.ArgumentParser(prog="python -m docs", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "site", help="the folder to write")
    arguments = parser.parse_args()
    output = arguments.output.absolute()
    with tempfile.TemporaryDirectory() as folder:
        pages = Path(folder) / "pages"
        navigation = write_pages(pages)
        config = Path(folder) / "mkdocs.yml"
        config.write_text(CONFIG.format(pages=pages, site=output, root=ROOT, nav="\n".join(navigation)))
        command = [generator(), "-m", "mkdocs", "build", "--clean", "--strict", "--config-file", str(config)]
        code = subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}).returncode
    if code == 0:
        print(f"the site is in {output}; to see it, with its search: python -m http.server -d {output}")
    return code


def generator() -> str:
    """The interpreter that has mkdocs: this one, or that of an environment made for it."""
    if importlib.util.find_spec("mkdocs") and importlib.util.find_spec("mkdocstrings"):
        return sys.executable
    environment = ROOT / ".venv-docs"
    python = environment / "bin" / "python"
    requirements = ROOT / "docs" / "requirements.txt"
    made_from = environment / "made-from"
    if not made_from.exists() or made_from.read_text() != requirements.read_text():
        print(f"making {environment}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(environment)], check=True)
        pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, "-r", str(requirements)], check=True, stderr=subprocess.DEVNULL)
        made_from.write_text(requirements.read_text())
    return str(python)


def write_pages(target: Path) -> List[str]:
    """Copy the pages and what they link to, write those of the reference; returns the navigation in YAML."""
    titles = {page: page for pages in PAGES.values() for page in pages}
    titles["README.md"] = "index.md"
    lines: List[str] = []
    copy_file(ROOT / "docs" / "site.css", target / "site.css")
    forgotten = unlisted_pages()
    if forgotten:
        raise SystemExit(f"no section of docs.__main__.PAGES has {forgotten}")
    for section, pages in PAGES.items():
        lines.append(f"  - {section}:")
        for page in pages:
            copy_page(ROOT / page, target / titles[page], target, titles)
            lines.append(f"    - {titles[page]}")
    return lines + write_reference(target / "api")


def copy_page(source: Path, copy: Path, target: Path, titles: Dict[str, str]) -> None:
    """Copy one page; links to other pages and to files of the repository lead to their copies."""

    def redirect(found: re.Match[str]) -> str:
        opening, link, anchor, closing = found.groups()
        if "://" in link or link.startswith("mailto:"):
            return found.group(0)
        linked = (source.parent / link).resolve()
        inside = str(linked.relative_to(ROOT))
        if inside in titles:
            goal = target / titles[inside]
        else:
            goal = target / "source" / inside
            copy_file(linked, goal)
            goal = goal / "index.html" if linked.is_dir() else goal
        return f"{opening}{os.path.relpath(goal, copy.parent)}{anchor or ''}{closing}"

    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(_LINK.sub(redirect, source.read_text()))


def copy_file(source: Path, goal: Path) -> None:
    """Copy a file that a page links to; of a directory, a list of its files.

    Raises:
        SystemExit: there is no such file.
    """
    if not source.exists():
        raise SystemExit(f"a page links to {source.relative_to(ROOT)}, which does not exist")
    if source.is_dir():
        goal.mkdir(parents=True, exist_ok=True)
        items = "".join(f"<li>{path.name}</li>" for path in sorted(source.iterdir()) if path.is_file())
        (goal / "index.html").write_text(f"<title>{source.name}</title><ul>{items}</ul>")
    else:
        goal.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, goal)


def unlisted_pages() -> Set[str]:
    """Pages of ``docs/`` that no section names."""
    listed = {page for pages in PAGES.values() for page in pages}
    return {str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")} - listed


if __name__ == "__main__":
    sys.exit(main())
