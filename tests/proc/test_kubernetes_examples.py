"""The manifests in examples/kubernetes agree with themselves and with what ringcomm reads."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any, Dict, Iterator, List

import pytest
import yaml
from click.testing import CliRunner

from ringcomm.config import Membership, Settings, misspelt_variables
from ringcomm.rendezvous.embedded import OwnRendezvous
from ringrun import cli

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
