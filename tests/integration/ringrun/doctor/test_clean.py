"""`ringrun clean` on several hosts, which are processes of this machine with caches of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ringrun import cli
from ringrun.agent import shipped
from ringrun.doctor import hosts as doctors_hosts

DIGEST = "ab" * 16


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    """``run(*words)``: exit code and output of ``ringrun clean``; b and c are reached by a command."""
    monkeypatch.setattr(doctors_hosts, "START_LIMIT_S", 60.0)
    monkeypatch.setattr(shipped, "SHARED_PLACES", ())
    monkeypatch.setattr(shipped.tempfile, "gettempdir", lambda: str(tmp_path / "a" / "tmp"))
    for name, folder in (("XDG_CACHE_HOME", "a/cache"), ("XDG_CONFIG_HOME", "a/config"), ("HOME", "a")):
        monkeypatch.setenv(name, str(tmp_path / folder))
    monkeypatch.delenv("TMPDIR", raising=False)
    script = tmp_path / "reach"
    script.write_text(
        f'#!/bin/sh\nhost=$1; shift\n[ "$host" = gone ] && {{ echo no way >&2; exit 3; }}\n'
        f'export XDG_CACHE_HOME="{tmp_path}/$host/cache" TMPDIR="{tmp_path}/$host/tmp"; mkdir -p "$TMPDIR"\n'
        'exec "$@"\n'
    )
    script.chmod(0o755)
    for host in ("a", "b", "c"):
        package = tmp_path / host / "cache" / "ringcomm" / DIGEST
        package.mkdir(parents=True, mode=0o700)
        (package / "file").write_bytes(bytes(200_000))

    def call(*words: str) -> Any:
        with pytest.raises(SystemExit) as caught:
            cli.main(["clean", "--via", f"{script} {{host}}", *words])
        out, err = capsys.readouterr()
        return caught.value.code, out + err

    return call


def packages(tmp_path: Path) -> str:
    return "".join(sorted(path.parts[-4] for path in tmp_path.glob(f"*/cache/ringcomm/{DIGEST}")))


def test_this_machine_and_the_hosts_of_all_lists(run: Any, tmp_path: Path) -> None:
    lists = tmp_path / "a" / "config" / "ringcomm" / "hosts"
    lists.mkdir(parents=True, mode=0o700)
    (lists / "one").write_text("localhost\nb\n")
    (lists / "two").write_text("c:2\nb\n")
    code, text = run("--dry-run")
    assert code == 0 and packages(tmp_path) == "abc"
    names = ["this machine", "b", "c"]
    assert [line.split(":")[0] for line in text.splitlines() if "would remove 0.2 MB" in line] == names
    assert f"  package  {tmp_path}/c/cache/ringcomm/{DIGEST}  0.2 MB" in text
    code, text = run()
    assert code == 0 and text.count(": removed 0.2 MB") == 3 and packages(tmp_path) == ""
    assert run()[1].count(": nothing to remove") == 3


def test_the_hosts_that_are_named_and_one_that_cannot_be_reached(run: Any, tmp_path: Path) -> None:
    code, text = run("-H", "localhost,gone,b")
    assert code == 1 and packages(tmp_path) == "c", text
    assert "gone: " in text and "no way" in text and "b: removed" in text


def test_what_a_host_says_is_made_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    from ringrun.doctor.hosts import _lines

    rows = {"removed": [["package", "/\x1b[2J", 5]], "kept": [["/x", "why\n"]]}
    assert _lines("h", rows, False) == [
        "h: removed 0.0 KB", "  package  /\\x1b[2J  0.0 KB", "  kept  /x: why\\n",
    ]  # fmt: skip
