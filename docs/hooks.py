"""Hooks of mkdocs: pages outside of ``docs`` are in the site, and links to source files lead to copies."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Optional

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {
    "README.md": "index.md", "SECURITY.md": "SECURITY.md", "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md", "benchmarks/README.md": "benchmarks.md",
}  # fmt: skip
"""Pages outside of ``docs``, and their places in the site."""
LINK = re.compile(r"(\]\()(?![a-z]+:|#)([^)#\s]+)")


def place_of(path: Path) -> Optional[str]:
    """Return where the site has a file of the repository; None for a folder."""
    inside = path.relative_to(ROOT).as_posix()
    if inside.startswith("docs/"):
        return inside[len("docs/") :]
    return OUTSIDE.get(inside, None if path.is_dir() else f"source/{inside}")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages outside of ``docs``, and every source file that a page links to."""
    for source, place in OUTSIDE.items():
        files.append(File.generated(config, place, content=(ROOT / source).read_text()))
    for page in [*(ROOT / "docs").rglob("*.md"), *(ROOT / source for source in OUTSIDE)]:
        for _, link in LINK.findall(page.read_text()):
            target = (page.parent / link).resolve()
            place = place_of(target) or ""
            if place.startswith("source/") and target.exists() and place not in files.src_uris:
                files.append(File.generated(config, place, abs_src_path=str(target)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Redirect links to where the site has their targets; a link to a folder becomes plain text. The search
    puts pages of the API after the others.
    """
    here = page.file.src_uri
    if here.startswith("api/"):
        page.meta["search"] = {"boost": 0.2}
    origin = next((source for source, place in OUTSIDE.items() if place == here), f"docs/{here}")

    def redirect(found: re.Match[str]) -> str:
        place = place_of(((ROOT / origin).parent / found[2]).resolve())
        return f"{found[1]}{os.path.relpath(place, Path(here).parent) if place else '#'}"

    return LINK.sub(redirect, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Remove the backslash before ``|`` in a table: Markdown needs it there, Python-Markdown keeps it."""
    return html.replace("\\|", "|")
