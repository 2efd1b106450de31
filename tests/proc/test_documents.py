"""Every code block of the documents runs in a test, or is checked as far as a fragment can be.

Python that is no whole program is compiled, and its names of ringcomm must be public. Commands
must parse, and name options, modules, scripts and settings that exist. Blocks of ``text`` show output.
"""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple

import pytest

from ringrun import cli
from ringrun.project import parse_project
from tests.proc.test_ringrun_support import ROOT, Launched
from tests.public_names import public_names, source_of

PAGES = [ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")]
PAGES += [ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = {"python", "sh", "bash", "yaml", "toml", "text"}

RUN_BY = {
    "# train.py": "tests/proc/test_readme.py",
    "# hvd_train.py": "tests/proc/test_readme.py",
    "# torch_train.py": "tests/proc/test_readme.py",
    "# keras_train.py": "tests/adapters/keras/test_examples.py",
    "# tensorflow_train.py": "tests/adapters/keras/test_examples.py",
    "# mxnet_train.py": "tests/adapters/mxnet/test_examples.py",
    "# mlx_train.py": "tests/adapters/mlx/test_mlx.py",
    "# elastic_numpy.py": "tests/proc/test_elastic_page.py",
    "# test_training.py": "tests/integration/job/test_reliability_page.py",
}
"""First lines of whole programs, and the tests that run them."""

SHORT_NAMES = {"rc": "ringcomm"}
"""What short names stand for in fragments, unless a block above on the same page imports them."""


class Block(NamedTuple):
    """One fenced block: where it begins, its language, its text without indentation, and modules by the
    short names under which this block and those above it import them."""

    where: str
    language: str
    text: str
    aliases: Dict[str, str]


def blocks_of(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page."""
    aliases = dict(SHORT_NAMES)
    found = re.finditer(r"^( *)```([\w-]*)\n(.*?)^ *```$", page.read_text(), re.DOTALL | re.MULTILINE)
    for match in found:
        indent, language, text = match.groups()
        line = match.string[: match.start()].count("\n") + 1
        imports = re.findall(r"^import (\S+) as (\w+)", text, re.MULTILINE)
        aliases.update({name: module for module, name in imports})
        text = re.sub(f"^{indent}", "", text, flags=re.MULTILINE)
        yield Block(f"{page.name}:{line}", language, text, dict(aliases))


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def blocks_in(*languages: str) -> List[object]:
    """Parameters of a test: the blocks in these languages, by their place."""
    return [pytest.param(block, id=block.where) for block in BLOCKS if block.language in languages]


@lru_cache(maxsize=None)
def help_of_ringrun() -> str:
    """Return what ``ringrun --help-all`` prints."""
    job = Launched("--help-all")
    assert job.finish(30.0) == 0, job.err
    return job.out


def test_every_block_has_a_language() -> None:
    assert {block.where: block.language for block in BLOCKS if block.language not in LANGUAGES} == {}


@pytest.mark.parametrize("first_line", RUN_BY)
def test_whole_programs_are_run(first_line: str) -> None:
    (block,) = [block for block in BLOCKS if block.text.startswith(f"{first_line}\n")]
    assert block.language == "python"
    assert first_line.lstrip("# ") in (ROOT / RUN_BY[first_line]).read_text()


@pytest.mark.parametrize("block", blocks_in("python"))
def test_python_compiles_and_its_names_are_public(block: Block) -> None:
    tree = ast.parse(block.text, block.where)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert [alias.name for alias in node.names if not exists(alias.name)] == []
        elif isinstance(node, ast.ImportFrom) and exists(node.module or "") and is_ours(node.module or ""):
            source = source_of(node.module or "").read_text()
            assert [alias.name for alias in node.names if not re.search(rf"\b{alias.name}\b", source)] == []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = block.aliases.get(node.value.id, "")
            if is_ours(module):
                public = node.attr in public_names(module) or exists(f"{module}.{node.attr}")
                assert public, f"{module} has no public name {node.attr}"


def is_ours(module: str) -> bool:
    """Return whether a module belongs to this repository."""
    return module.split(".")[0] in ("ringcomm", "ringrun")


def exists(module: str) -> bool:
    """Return whether a module of this repository exists; others count as existing."""
    return not is_ours(module) or source_of(module).exists()


@pytest.mark.parametrize("block", blocks_in("sh", "bash"))
def test_commands_parse_and_name_what_exists(block: Block) -> None:
    done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    commands = 0
    for line in block.text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
        lexer.whitespace_split = True
        words: List[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set("&|;"):
                commands += bool(words)
                check_command(words)
                words = []
            else:
                words.append(word)
    assert commands > 0


def check_command(words: List[str]) -> None:
    """Options of ringrun, modules, scripts of this repository and settings in one command exist."""
    programs = [Path(word).name for word in words]
    if "ringrun" in programs[:1]:
        end = next((index for index, word in enumerate(words) if word.endswith(".py")), len(words))
        options = [word.split("=")[0] for word in words[1:end] if word.startswith("-") and word != "-m"]
        assert [item for item in options if not re.search(rf"(?<![\w-]){item}\b", help_of_ringrun())] == []
    for index, word in enumerate(words):
        if words[index - 1] == "-m" and word.startswith(("ringcomm", "benchmarks")):
            assert source_of(word).exists(), word
        if re.match(r"(examples|benchmarks|tests|docs)/", word):
            assert (ROOT / word).exists(), word
        for name in re.findall(r"\bRINGCOMM_[A-Z_]+", word):
            assert re.search(rf"\b{name}\b", variables())
        if re.match(r"benchmarks/\w+\.py", word):
            sources = "".join(path.read_text() for path in (ROOT / "benchmarks").glob("*.py"))
            named = [item for item in words[index:] if item.startswith("--")]
            assert [item for item in named if f'"{item}"' not in sources] == []
    if words[:2] == ["bash", "tests/run.sh"]:
        script = (ROOT / "tests" / "run.sh").read_text()
        assert [item for item in words[2:] if item.startswith("--") and f"{item})" not in script] == []


def variables() -> str:
    """A text with all environment variables: the settings' page, which a test keeps true, and the others."""
    paths = ("docs/configuration.md", "ringcomm/configuration/membership.py")
    return "".join((ROOT / path).read_text() for path in paths)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="no parser of TOML in this Python")
@pytest.mark.parametrize("block", blocks_in("toml"))
def test_project_files_are_understood(block: Block) -> None:
    assert parse_project(block.text, Path("/home/me/ringrun.toml"), cli.ringrun).keys
