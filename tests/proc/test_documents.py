"""Every code block of the documents runs in a test, or its names, commands and options are checked."""

from __future__ import annotations

import ast
import importlib.util
import re
import secrets
import shlex
import socket
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple

import pytest
import yaml
from click.testing import CliRunner

from ringcomm.config import Membership, Settings, misspelt_variables
from ringcomm.rendezvous.embedded import OwnRendezvous
from ringrun import cli
from ringrun.plan.hosts import parse_hostfile, parse_hosts
from ringrun.project import parse_project
from tests.proc.test_ringrun_support import ROOT, SOURCES, Launched
from tests.public_names import public_names, source_of
from tests.support.programs import run_python
from tests.support.service import free_port

PAGES = [ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")]
PAGES += [ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = {"python", "sh", "bash", "yaml", "toml", "text"}

RUN_BY = {
    "# train.py": "tests/proc/test_documents.py",
    "# hvd_train.py": "tests/proc/test_documents.py",
    "# torch_train.py": "tests/proc/test_documents.py",
    "# keras_train.py": "tests/adapters/keras/test_examples.py",
    "# tensorflow_train.py": "tests/adapters/keras/test_examples.py",
    "# mxnet_train.py": "tests/adapters/mxnet/test_examples.py",
    "# mlx_train.py": "tests/adapters/mlx/test_mlx.py",
    "# elastic_numpy.py": "tests/proc/test_elastic_launcher_jobs.py",
    "# test_training.py": "tests/proc/test_documents.py",
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


LIMIT_S = 100.0
TEXT = "\n".join(page.read_text() for page in PAGES if page.parent.name != "benchmarks")


def block(containing: str) -> str:
    """The one fenced block of all pages with these words in it."""
    (found,) = [text for text in re.findall(r"```\w*\n(.*?)```", TEXT, re.DOTALL) if containing in text]
    return str(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = [link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", page.read_text())]
    assert [item for item in targets if item and not (page.parent / item).exists()] == []


def test_train_py(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(block("# train.py\nimport"))
    assert run_python("train.py", cwd=tmp_path) == "rank 0 of 1 has learned [1. 2. 3.]\n"
    job = Launched("-np", "4", "train.py", cwd=tmp_path)
    assert job.finish(LIMIT_S) == 0, job.err
    lines = [f"[localhost:{rank}] rank {rank} of 4 has learned [1. 2. 3.]" for rank in range(4)]
    assert sorted(job.out.splitlines()) == lines


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")
@pytest.mark.parametrize(
    "script", ["torch_train.py", pytest.param("hvd_train.py", marks=pytest.mark.release)]
)
def test_torch_train_py(tmp_path: Path, script: str) -> None:
    (tmp_path / script).write_text(block(f"# {script}\nimport"))
    job = Launched("-np", "2", script, cwd=tmp_path)
    assert job.finish(LIMIT_S) == 0, job.err
    losses = [float(line.split()[-1]) for line in job.out.splitlines()]
    assert len(losses) == 5
    assert losses[-1] < 1e-3


def test_the_function_in_a_notebook(tmp_path: Path) -> None:
    text = block("rc.run(count")
    expected = re.findall(r"# (\[.*?\]):", text)
    printing = re.sub(r"^rc\.run(.*?\))  ", r"print(rc.run\1)  ", text, flags=re.MULTILINE)
    (tmp_path / "cell.py").write_text(printing)
    printed = run_python("cell.py", cwd=tmp_path).splitlines()
    assert [line for line in printed if not line.startswith("ringrun: ")] == expected


def test_the_test_of_a_users_program_passes(tmp_path: Path) -> None:
    (tmp_path / "test_training.py").write_text(block("# test_training.py\n"))
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_training.py")
    assert "7 passed" in run_python(*words, cwd=tmp_path)


def test_without_ringrun(tmp_path: Path) -> None:
    lines = block("RINGCOMM_RENDEZVOUS=")
    assert set(re.findall(r"RINGCOMM_[A-Z_]+", lines)) == {
        "RINGCOMM_SIZE", "RINGCOMM_RENDEZVOUS", "RINGCOMM_KEY_FILE"
    }  # fmt: skip
    (tmp_path / "train.py").write_text(block("# train.py\nimport"))
    (tmp_path / "job.key").write_text(secrets.token_hex(32) + "\n")
    (tmp_path / "job.key").chmod(0o600)
    port = free_port()
    env = {
        "PYTHONPATH": SOURCES, "RINGCOMM_SIZE": "2", "RINGCOMM_KEY_FILE": "job.key",
        "RINGCOMM_RENDEZVOUS": f"127.0.0.1:{port}",
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, "train.py"], cwd=tmp_path, env=env,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    outputs = sorted(rank.communicate(timeout=LIMIT_S)[0] for rank in ranks)
    assert outputs == [f"rank {rank} of 2 has learned [1. 2. 3.]\n" for rank in range(2)]


def test_hostfile_and_host_list() -> None:
    hosts = parse_hostfile(block("# ringrun --hostfile hosts train.py"), "hosts")
    assert [(host.target, host.slots) for host in hosts] == [
        ("localhost", None), ("jetson1", 2), ("me@office", None), ("fd00::7", 1)
    ]  # fmt: skip
    assert hosts[2].python == "/home/me/env/bin/python"
    (listed,) = re.findall(r"`-H (localhost:2\S+)`", TEXT)
    assert [host.target for host in parse_hosts(listed)] == ["localhost", "me@office", "fd00::7"]


FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"


def documents(name: str) -> List[Dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def containers(part: Any) -> Iterator[Dict[str, Any]]:
    """All containers in a manifest."""
    if isinstance(part, dict):
        yield from part.get("containers", ())
        for value in part.values():
            yield from containers(value)
    elif isinstance(part, list):
        for value in part:
            yield from containers(value)


def test_the_job() -> None:
    service, job = documents("job.yaml")
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    # Without a headless service of this name pods have no names; rank 0 needs its own before it is ready.
    assert service["metadata"]["name"] == pod["subdomain"] and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"job-name": name}
    (container,) = containers(job)
    variables = {item["name"]: item.get("value", "2") for item in container["env"]}
    assert misspelt_variables(variables) == []
    Settings.from_environment(variables)
    assert int(variables["RINGCOMM_SIZE"]) == spec["completions"] == spec["parallelism"]
    assert spec["completionMode"] == "Indexed"
    key = Path(variables.pop("RINGCOMM_KEY_FILE"))
    membership = Membership.from_environment({**variables, "RINGCOMM_KEY": "ab" * 32})
    assert membership.rank == 2
    assert [host for host, _ in membership.rendezvous] == [f"{name}-0.{pod['subdomain']}"]
    (mount,), (volume,) = container["volumeMounts"], pod["volumes"]
    assert mount["name"] == volume["name"] and Path(mount["mountPath"]) == key.parent
    assert volume["secret"]["defaultMode"] & 0o077 == 0  # others may not read the key
    assert (FOLDER.parent / Path(container["command"][1]).name).is_file()


def test_the_runtime_starts_ringrun() -> None:
    (runtime,) = documents("training_runtime.yaml")
    assert runtime["kind"] == "ClusterTrainingRuntime"
    launcher, node = containers(runtime)
    assert launcher["command"][0] == "ringrun" and node["command"][0].endswith("sshd")
    result = CliRunner().invoke(cli.ringrun, ["--dry-run", *launcher["command"][1:]])
    assert result.exit_code == 0, result.output
    jobs = {item["name"] for item in runtime["spec"]["template"]["spec"]["replicatedJobs"]}
    assert set(runtime["spec"]["template"]["spec"]["successPolicy"]["targetReplicatedJobs"]) < jobs


def test_rank_0_waits_until_its_own_name_resolves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service has an address for a pod only some time after the pod has started."""
    real, lookups = socket.getaddrinfo, []

    def late(host: Any, port: Any, *rest: Any, **options: Any) -> Any:
        if host != "digits-0.digits":
            return real(host, port, *rest, **options)
        lookups.append(host)
        if len(lookups) < 4:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real("127.0.0.1", port, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", late)
    where = (("digits-0.digits", 0),)
    settings = Settings(start_timeout_s=60.0)
    other = Membership(size=2, rank=None, rendezvous=where, key=bytes(32))
    with OwnRendezvous(other, settings) as own:
        assert own.embedded is None and len(lookups) == 1
    with OwnRendezvous(Membership(size=2, rank=0, rendezvous=where, key=bytes(32)), settings) as own:
        assert own.embedded is not None and len(lookups) == 4
    own.embedded.stop(failed=True)
