"""Lists of hosts that have names: ``ringrun hosts``, and ``-H LIST``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Dict, List

import pytest

from ringcomm.errors import ConfigError
from ringrun import cli
from ringrun.job.launch import read_hosts
from ringrun.plan.hosts import HostSpec
from ringrun.plan.options import Options
from ringrun.reach.named_hosts import folder_of_lists, ssh_hosts, with_lists


@pytest.fixture(autouse=True)
def lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of lists, which does not exist yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return folder_of_lists(os.environ)


@pytest.fixture
def run(capsys: Any) -> Any:
    """``run("add lab a")``: the output of ``ringrun hosts add lab a``, with its exit code in front."""

    def call(line: str) -> str:
        with pytest.raises(SystemExit) as caught:
            cli.main(["hosts", *line.split()])
        out, err = capsys.readouterr()
        assert not (out and err)
        return f"{caught.value.code} {out}{err}"

    return call


def test_a_list_is_made_used_and_removed(run: Any, lists: Path) -> None:
    assert run("").startswith("0 There is no list of hosts yet. Make one: ringrun hosts add lab")
    assert run("add lab localhost,me@b:2 [fd00::7]").startswith("0 lab has 3 hosts: ")
    assert run("") == f"0 lab  localhost, me@b:2, [fd00::7]\nThey are in {lists}.\n"
    assert run("show lab") == "0 localhost\nme@b:2\n[fd00::7]\n"
    assert lists.stat().st_mode & 0o777 == 0o700 and (lists / "lab").stat().st_mode & 0o777 == 0o600
    specs = read_hosts(Options(hosts="x:3,lab"))
    assert [spec.item for spec in specs] == ["x:3", "localhost", "me@b:2", "[fd00::7]"]
    assert run("drop lab me@b localhost") == "0 lab does not have me@b, localhost any more.\n"
    assert run("drop lab fd00::7") == "0 The list lab is removed.\n"
    assert run("").startswith("0 There is no list") and read_hosts(Options(hosts="lab")) == [HostSpec("lab")]


def test_what_the_user_has_written_into_a_list_stays(run: Any, lists: Path) -> None:
    run("add lab a b")
    (lists / "lab").write_text("# mine\na slots=2 python=/p\n\nb # the slow one\nbad line=\n")
    assert run("").startswith("0 lab  cannot be used: ")
    assert run("drop lab bad b").startswith("0 lab does not have bad, b")
    assert run("add lab c").startswith("0 lab has 2 hosts")
    assert (lists / "lab").read_text() == "# mine\na slots=2 python=/p\n\nc\n"
    assert with_lists([HostSpec("lab")], os.environ)[0] == HostSpec("a", slots=2, python="/p")


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("show none", "1 ringrun: There is no list of hosts 'none' (there are: lab)."),
        ("drop none", "2 ringrun: There is no list of hosts 'none'"),
        ("drop lab z", "2 ringrun: lab has no host 'z'. `ringrun hosts show lab`"),
        ("add localhost a", "2 ringrun: 'localhost' cannot be the name of a list"),
        ("add ../lab a", "2 ringrun: '../lab' cannot be the name of a list"),
        ("add lab lab", "2 ringrun: A list and a host in it cannot both be lab"),
        ("add lab a", "2 ringrun: lab has a already. First: ringrun hosts drop lab a"),
        ("add new a:0", "2 ringrun: ringrun hosts add: 'a:0': '0' is not a whole number from 1"),
        ("nope", "2 Usage: ringrun hosts"),
        ("import new", "2 ringrun: {home}/.ssh/config cannot be read: no such file or directory."),
    ],
)
def test_mistakes(line: str, answer: str, run: Any, tmp_path: Path) -> None:
    run("add lab a b")
    assert run(line).startswith(answer.format(home=tmp_path))
    assert run("show lab") == "0 a\nb\n" and run("").count("\n") == 2


@pytest.mark.parametrize("item", ["lab:2", "me@lab"])
def test_a_list_has_neither_slots_nor_an_account(item: str, run: Any) -> None:
    run("add lab a")
    with pytest.raises(ConfigError, match="lab is a list of hosts .*--slots-per-host"):
        read_hosts(Options(hosts=item))


@pytest.mark.parametrize("what", ["empty", "binary", "writable", "fifo", "folder"])
def test_a_list_that_cannot_be_used_is_named(what: str, run: Any, lists: Path) -> None:
    run("add lab a")
    path = lists / "lab"
    if what == "folder":
        lists.chmod(0o777)
    elif what == "writable":
        path.chmod(0o666)
    else:
        path.unlink()
        if what == "fifo":
            os.mkfifo(path)
        else:
            path.write_bytes(b"" if what == "empty" else b"\xff")
    with pytest.raises(ConfigError, match=str(path)):
        read_hosts(Options(hosts="lab"))
    assert [spec.name for spec in read_hosts(Options(hosts="other"))] == ["other"]


SSH = """
Host jetson1 jetson2
    HostName 10.0.0.1
host "office" !bad *.example.com jetson?
Host=equals # a comment
Match host never
Host jetson1 -bad "open
Include more/*.conf "~/tilde.conf" missing
"""


def test_hosts_are_taken_from_sshs_configuration(run: Any, tmp_path: Path) -> None:
    files: Dict[str, str] = {
        ".ssh/config": SSH, ".ssh/more/a.conf": "Host a\nInclude more/b.conf\n",
        ".ssh/more/b.conf": "Host b a\nInclude more/a.conf config\n", "tilde.conf": "Host tilde\n",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    every: List[str] = ["jetson1", "jetson2", "office", "equals", "a", "b", "tilde"]
    assert ssh_hosts((), tmp_path / ".ssh" / "config") == every
    assert run("import lab") == (
        f"2 {tmp_path}/.ssh/config has: {', '.join(every)}\n"
        "Say which, like: ringrun hosts import lab jetson1\n"
    )
    assert run("import lab jet* tilde").startswith("0 lab has 3 hosts: jetson1, jetson2, tilde")
    answer = run("import lab nope")
    assert answer.startswith("2 ") and "names no host that matches nope. It has: jetson1, " in answer
    (tmp_path / ".ssh" / "config").write_text("Host *\n")
    assert "names no host. It has: none." in run("import lab")


def test_a_list_that_is_a_link_is_refused_with_what_to_do(run: Any, lists: Path, tmp_path: Path) -> None:
    run("add lab a")
    (lists / "lab").rename(tmp_path / "kept")
    (lists / "lab").symlink_to(tmp_path / "kept")
    with pytest.raises(ConfigError, match="cannot be used: it is a symbolic link"):
        read_hosts(Options(hosts="lab"))
    assert read_hosts(Options(hostfile=str(tmp_path / "kept")))
