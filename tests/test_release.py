"""The version is the same wherever it stands, and the classifier promises no more than was run.

    python -m tests.test_release v1.0.0      what keeps this tag from being published, if anything does
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import List

ROOT = Path(__file__).resolve().parents[1]


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def found(pattern: str, name: str) -> str:
    """Return what the group of a pattern matches in a file."""
    match = re.search(pattern, text_of(name), re.MULTILINE)
    assert match is not None, f"{name} has no {pattern}"
    return match.group(1)


def version() -> str:
    return found(r'^__version__ = "(.+)"$', "ringcomm/version.py")


def problems(tag: str) -> List[str]:
    """Return what keeps a tag from being published."""
    heading = found(r"^## (.+)$", "CHANGELOG.md")
    problems = []
    if tag != f"v{version()}":
        problems.append(f"the tag is {tag}, but ringcomm/version.py has {version()}")
    if not re.fullmatch(rf"{re.escape(version())} \(\d{{4}}-\d\d-\d\d\)", heading):
        problems.append(f"the first heading of CHANGELOG.md is {heading!r}, not '{version()} (YYYY-MM-DD)'")
    return problems


def test_the_version_stands_everywhere() -> None:
    assert found(r"^version: (.+)$", "CITATION.cff") == version()
    assert found(r"^## (\S+) \(", "CHANGELOG.md") == version()


def test_a_tag_is_published_only_with_its_number() -> None:
    assert f"ringcomm/version.py has {version()}" in problems("v0.0.0")[0]
    assert [each for each in problems(f"v{version()}") if "tag" in each] == []


def test_beta_until_it_has_run_on_hardware() -> None:
    status = found(r'"Development Status :: (.+)"', "pyproject.toml")
    not_run = "**not**" in text_of("README.md")
    assert status == ("4 - Beta" if not_run else "5 - Production/Stable")
    assert ("classified as beta" in text_of("docs/stability.md")) == not_run


def test_the_workflow_publishes_what_was_tested() -> None:
    release = text_of(".github/workflows/tests.yml").partition("\n  release:")[2]
    steps = ["needs: [linux, macos]", "refs/tags/v", "id-token: write", "tests.test_release", "-m build",
             "twine check", "gh-action-pypi-publish"]  # fmt: skip
    assert [words for words in steps if words not in release] == []


if __name__ == "__main__":
    sys.exit("\n".join(problems(sys.argv[1])) or 0)
