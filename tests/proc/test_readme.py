"""The commands in the README work, and its links have targets."""

from __future__ import annotations

import importlib.util
import re
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from ringrun.plan.hosts import parse_hostfile, parse_hosts
from tests.proc.test_ringrun_support import ROOT, SOURCES, Launched
from tests.support.programs import run_python
from tests.support.service import free_port

LIMIT_S = 100.0
PAGES = [*(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY"))]
PAGES += sorted((ROOT / "docs").glob("*.md"))
TEXT = "\n".join(page.read_text() for page in PAGES)


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


def test_options_exist() -> None:
    job = Launched("--help-all")
    assert job.finish(LIMIT_S) == 0
    readme = (ROOT / "README.md").read_text()
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", readme)) - {"--ci", "--all", "--no-apt"}
    assert named
    assert sorted(option for option in named if not re.search(rf"{option}\b", job.out)) == []
