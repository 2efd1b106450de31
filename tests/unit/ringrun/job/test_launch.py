"""From options to a job: hosts, files, variables, and the addresses of the rendezvous."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List

import pytest

from ringcomm.config import Slot
from ringcomm.errors import ConfigError
from ringcomm.transport import nics
from ringrun.job import launch, ranks
from ringrun.job.launch import describe, invited, prepare
from ringrun.job.ranks import master_variables, rendezvous_addresses, rendezvous_variables
from ringrun.join.invitation import Joined
from ringrun.plan.environment import from_values
from ringrun.plan.hosts import HostSpec
from ringrun.plan.options import Options
from ringrun.reach import base

ENVIRON = {"PATH": "/nowhere", "TOKEN": "hunter2"}
FIND_LOCAL = base.find_local


def test_a_job() -> None:
    options = Options(
        np=3,
        hosts="localhost,me@far:2",
        forward=("TOKEN",),
        python=("far=/p",),
        cwd=("far=/c",),
        iface=("en*", "far=eth0"),
    )
    job = prepare(options, ["python", "train.py"], ENVIRON)
    here, far = job.hosts
    assert (here.is_local, here.python, here.command.argv) == (True, sys.executable, (None, "train.py"))
    assert (far.is_local, far.python, far.cwd, far.command.argv) == (False, "/p", "/c", (None, "train.py"))
    assert here.argv[0] == sys.executable and far.argv[0] == "ssh" and "me@far" in far.argv
    assert here.env == {"TOKEN": "hunter2", "RINGCOMM_IFACE": "en*"}
    assert far.env == {"TOKEN": "hunter2", "RINGCOMM_IFACE": "eth0"}
    assert job.slot_of(2) == Slot(1, 1) and job.host_of(2) is far and not job.all_local
    assert len(job.key) == 32


@pytest.mark.parametrize(
    ("host", "options", "is_encrypted"),
    [("8.8.8.8", {}, True), ("192.168.1.9", {}, False), ("100.64.0.9", {}, False), ("2600::1", {}, True),
     ("8.8.8.8", {"encrypt": False}, False), ("8.8.8.8", {"min_np": 1}, True)],
)  # fmt: skip
def test_a_job_with_a_public_address_is_encrypted(
    monkeypatch: pytest.MonkeyPatch, host: str, options: Dict[str, Any], is_encrypted: bool
) -> None:
    monkeypatch.setattr(base, "find_local", FIND_LOCAL)  # it asks no resolver for numbers
    settings = from_values({name: options.pop(name) for name in ("encrypt",) if name in options})
    name = f"[{host}]" if ":" in host else host
    job = prepare(Options(hosts=f"localhost,{name}", setting_values=settings, **options), ["x.py"], ENVIRON)
    assert bool(job.certificate) == is_encrypted
    line = f"{host} has a public address, so connections are encrypted (--no-encrypt: they are not)"
    assert (line in job.notes) == is_encrypted


def test_without_a_certificate_the_error_tells_why_one_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise ConfigError("No openssl here.")

    monkeypatch.setattr(base, "find_local", FIND_LOCAL)
    monkeypatch.setattr(launch, "make_certificate", fail)
    with pytest.raises(ConfigError, match=r"No openssl here\. .* 8\.8\.8\.8 .*--no-encrypt"):
        prepare(Options(hosts="localhost,8.8.8.8"), ["x.py"], ENVIRON)
    with pytest.raises(ConfigError, match=r"No openssl here\.$"):
        prepare(Options(setting_values=from_values({"encrypt": True})), ["x.py"], ENVIRON)


def test_one_machine_under_two_names(monkeypatch: pytest.MonkeyPatch) -> None:
    local = lambda specs, **_: [spec.name != "far" for spec in specs]  # noqa: E731
    monkeypatch.setattr(base, "find_local", local)
    with pytest.raises(ConfigError, match="localhost and 127.0.0.1 are one machine.*like localhost:3"):
        prepare(Options(hosts="localhost:2,far,127.0.0.1"), ["x.py"], ENVIRON)


@pytest.mark.parametrize(
    ("options", "environ", "words"),
    [
        (Options(setting_values=from_values({"late_after_s": float("nan")})), {},
         "late_after_s=nan cannot be used"),
        (Options(setting_values=from_values({"late_after_s": -1})), {}, "late_after_s=-1 cannot be used"),
        (Options(iface=("10.0.0.0/99",)), {}, "--iface '10.0.0.0/99' is not a network"),
        (Options(hosts="a,b", iface=("b=10.0.0/8",)), {}, "'10.0.0/8' is not a network"),
        (Options(), {"RINGCOMM_IFACE": "eth0,!1.2.3.4/-1"}, "is not a network"),
        (Options(), {"RINGCOMM_TRANSPORT": "fast"}, "RINGCOMM_TRANSPORT='fast' .*memory"),
        (Options(), {"RINGCOMM_LATE_AFTER": "nan"}, "RINGCOMM_LATE_AFTER='nan'"),
    ],
)  # fmt: skip
def test_values_that_make_no_sense_are_refused_before_anything_starts(
    options: Options, environ: Dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        prepare(options, ["x.py"], {**ENVIRON, **environ})


ALONE = {0: {"port": 5, "login": "10.0.0.9 1 10.0.0.8 22"}}
FROM_HERE = {
    0: {"port": 5, "login": "10.0.0.9 1 10.0.0.8 22"},
    1: {"port": 6, "login": "10.0.0.1 1 10.0.0.2 22"},
}


@pytest.mark.parametrize(
    ("hosts", "facts", "address"),
    [
        ("localhost:2", ALONE, "127.0.0.1"),
        ("far:2", ALONE, "127.0.0.1"),
        ("far,other", FROM_HERE, "10.0.0.8"),
        ("far,localhost", FROM_HERE, "10.0.0.8"),
        ("far,other", {**FROM_HERE, 0: {"port": 5, "login": ""}}, "far"),
        ("far,other", {**FROM_HERE, 0: {"port": 5, "login": "127.0.0.1 1 127.0.0.1 22"}}, "far"),
        ("far,other", {**FROM_HERE, 0: {"port": 5, "login": "fe80::1%e 1 fe80::2%e 22"}}, "far"),
        ("localhost,far", FROM_HERE, "10.0.0.1"),
        ("localhost,far", {**FROM_HERE, 1: {"port": 6, "login": "10.7.7.7 1 10.0.0.2 22"}}, "192.168.0.1"),
        ("localhost,far", {**FROM_HERE, 1: {"port": 6, "login": "FD00::0001 1 fd00::2 22"}}, "fd00::1"),
    ],
)  # fmt: skip
def test_where_others_meet(monkeypatch: pytest.MonkeyPatch, hosts: str, facts: Any, address: str) -> None:
    own = ["192.168.0.1", "10.0.0.1", "fd00::1"]
    monkeypatch.setattr(ranks, "rendezvous_addresses", lambda job: own)
    job = prepare(Options(hosts=hosts), ["x.py"], ENVIRON)
    for host in job.hosts:
        found = master_variables(job, host, facts)
        assert found.pop("RINGCOMM_MASTER") == f"{address},5,{job.plan.size}"
        assert found == {"MASTER_ADDR": address, "MASTER_PORT": "5"}
    job = prepare(Options(hosts=hosts, forward=("MASTER_ADDR=x",)), ["x.py"], ENVIRON)
    assert master_variables(job, job.hosts[0], facts) == {"MASTER_PORT": "5"}


def test_where_the_rendezvous_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other hosts are not sent to the loopback, and to docker0 only if nothing else answers."""
    interfaces = [
        nics.Interface("eth0", "10.0.0.1", nics.WIRED, 24),
        nics.Interface("docker0", "172.17.0.1", nics.VIRTUAL, 16),
    ]
    monkeypatch.setattr(nics, "own_addresses", lambda: interfaces)
    endpoints = [("10.0.0.1", 1), ("172.17.0.1", 2), ("127.0.0.1", 3), ("::1", 4)]
    here, far = prepare(Options(hosts="localhost,far"), ["x.py"], ENVIRON).hosts
    places = {host.name: rendezvous_variables(endpoints, host, {}) for host in (here, far)}
    assert places["localhost"]["RINGCOMM_RENDEZVOUS"] == "10.0.0.1:1,127.0.0.1:3,[::1]:4;172.17.0.1:2"
    assert places["far"]["RINGCOMM_RENDEZVOUS"] == "10.0.0.1:1;172.17.0.1:2"
    assert places["far"]["RINGCOMM_RENDEZVOUS_MACHINE"] == nics.machine()
    assert rendezvous_variables(endpoints[1:], far, {})["RINGCOMM_RENDEZVOUS"] == "172.17.0.1:2"
    assert rendezvous_variables(endpoints[2:], far, {}) == {}


PATH_AND_STEPS = {"PATH": "/nowhere", "STEPS": "3"}


@pytest.mark.parametrize(
    ("options", "inherited", "passed"),
    [
        ({}, {}, {"STEPS": "200", "TOKEN": "hunter2"}),
        ({"forward": ("PATH", "STEPS=3")}, PATH_AND_STEPS, {**PATH_AND_STEPS, "TOKEN": "hunter2"}),
        ({"no_env": True}, {}, {}),
    ],
)
def test_hosts_other_than_this_machine_get_the_shells_variables(
    options: Any, inherited: Any, passed: Any
) -> None:
    environ = {**ENVIRON, "STEPS": "200"}
    here, far = prepare(Options(hosts="localhost,far", **options), ["x.py"], environ).hosts
    assert (here.env, far.env) == (inherited, passed)
    for kind in ({}, {"min_np": 1, "slots_per_host": 1}):
        job = prepare(Options(hosts="far", **kind, **options), ["x.py"], environ)
        line = f"    with {', '.join(sorted(passed))} in its environment\n"
        assert (line in describe(job)) is bool(passed) and "hunter2" not in describe(job)


@pytest.mark.parametrize("encrypt", [False, True])
def test_no_secret_is_in_any_description(encrypt: bool) -> None:
    environ = {**ENVIRON, "RINGCOMM_ENCRYPT": "1" if encrypt else "0"}
    job = prepare(Options(hosts="localhost,far", forward=("TOKEN",)), ["x.py"], environ)
    config = job.agent_config(job.hosts[1])
    assert config["key"] == "\n".join([job.key.hex(), job.certificate] if encrypt else [job.key.hex()])
    assert ("PRIVATE KEY" in json.dumps(config["key"])) == encrypt
    assert "PRIVATE KEY" not in json.dumps({**config, "key": ""})
    for text in (describe(job), repr(job), *job.hosts[0].argv, *job.hosts[1].argv):
        assert "PRIVATE KEY" not in text
    elastic = prepare(Options(hosts="far", min_np=1, forward=("TOKEN",)), ["x.py"], environ)
    for text in (describe(job), repr(job), repr(elastic), *job.hosts[0].argv, *job.hosts[1].argv):
        assert "hunter2" not in text and job.key.hex() not in text and repr(job.key) not in text


def test_what_a_file_says_of_absent_hosts_and_unset_variables_is_ignored() -> None:
    options = Options(
        hosts="localhost:2", python=("far=/p", "localhost=/q"), cwd=("far=/c",), iface=("far=eth7",),
        forward=("UNSET", "TOKEN"), project_names=("python", "cwd", "iface", "forward"),
    )  # fmt: skip
    job = prepare(options, ["train.py"], ENVIRON)
    assert (job.hosts[0].python, job.notes) == ("/q", ())
    assert job.hosts[0].env == {"TOKEN": "hunter2"}
    with pytest.raises(ConfigError, match="'far' is not among the hosts"):
        prepare(replace(options, project_names=()), ["train.py"], ENVIRON)


def test_the_script_is_looked_for_before_files_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / ".ringignore").write_text("train.py")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"--ship does not send the program train.py: git or .ringignore"):
        prepare(Options(hosts="far", ship="."), ["train.py"], ENVIRON)
    monkeypatch.setattr(launch, "SourceTree", None)
    with pytest.raises(ConfigError, match=f"There is no script tran.py in {tmp_path}"):
        prepare(Options(hosts="far", ship="."), ["tran.py"], ENVIRON)


def test_a_folder_is_fetched_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = Options(hosts="far", ship=".", fetch=("out/", "log/*"))
    assert prepare(options, ["-m", "x"], ENVIRON).fetch == ("out/", "out/**", "log/*")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Options(hosts="a", min_np=1, host_discovery_script="./find-hosts", slots_per_host=1),
         "--host-discovery-script and a list of hosts are both given"),
        (Options(fetch=("out/*",)), "Add --ship"),
        (Options(hostfile="/nowhere/hosts"), "The hostfile /nowhere/hosts cannot be read: No such file"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_each_other(options: Options, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        prepare(options, ["x.py"], ENVIRON)


WIRED = nics.Interface("eth0", "192.0.2.1", nics.WIRED, 24)
LINK_LOCAL = nics.Interface("eth0", "fe80::1", nics.WIRED, 64, scope=2)
LOOPBACK = nics.Interface("lo", "127.0.0.1", nics.LOOPBACK, 8)


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> List[nics.Interface]:
    """This machine's, which a test chooses."""
    found: List[nics.Interface] = []
    monkeypatch.setattr(nics, "own_addresses", lambda spec="": found if spec != "none" else [])
    return found


@pytest.mark.parametrize(
    ("ifaces", "text"),
    [((), "except the loopback's, but"), (("none",), "loopback's that matches --iface none, but")],
)
def test_a_machine_that_other_hosts_cannot_reach(
    interfaces: List[nics.Interface], ifaces: tuple, text: str
) -> None:
    interfaces += [LINK_LOCAL, LOOPBACK]
    job = prepare(Options(hosts="localhost,far", iface=ifaces), ["true"], {"PATH": "/"})
    with pytest.raises(ConfigError, match=text):
        rendezvous_addresses(job)


@pytest.mark.parametrize("login", ["203.0.113.9 43117 10.0.0.2 5", "203.0.113.9 x 10.0.0.2 5", ""])
def test_a_machine_that_has_joined_gets_the_address_that_it_has_dialled(
    interfaces: List[nics.Interface], login: str
) -> None:
    """A router forwards that port. The job encrypts, so that the proof does not cover the address."""
    interfaces += [WIRED, LOOPBACK]
    way = Joined()
    way.dials_port = True
    joined = [(HostSpec("desk", slots=1), way)]
    job = prepare(Options(hosts="localhost,join:1@43117"), ["true"], {"PATH": "/"}, joined=joined)
    assert job.port == 43117 and job.certificate
    found = [
        rendezvous_variables([(WIRED.address, 43117)], host, {"login": login})["RINGCOMM_RENDEZVOUS"]
        for host in job.hosts
    ]
    forwarded = ",203.0.113.9:43117" if "9 43117" in login else ""
    assert found == ["192.0.2.1:43117", f"192.0.2.1:43117{forwarded}"]


@pytest.mark.parametrize(
    ("hosts", "text"),
    [("join:desk,join:desk", "join:desk twice.*--slots"), ("join:1@5999,join:1@6000", "ports 5999 and 6000")],
)
def test_machines_that_cannot_join(hosts: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        invited(Options(hosts=hosts))


def test_no_encrypt_has_no_effect_on_machines_that_join() -> None:
    options = Options(hosts="localhost,join", setting_values=from_values({"encrypt": False}))
    job = prepare(options, ["true"], {"PATH": "/"}, joined=[(HostSpec("desk", slots=1), Joined())])
    assert job.certificate and "encrypted, in spite of --no-encrypt" in job.notes[-1]
