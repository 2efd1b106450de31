"""The manifests in examples/kubernetes against the schemas of Kubernetes, without a cluster."""

from __future__ import annotations

from typing import Any, Dict, List

import pytest

from tests.adapters.clusters.programs_run import ROOT

yaml = pytest.importorskip("yaml")
kubernetes = pytest.importorskip("kubernetes_validate")
FOLDER = ROOT / "examples" / "kubernetes"


def documents(name: str) -> List[Dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def valid(document: Dict[str, Any]) -> None:
    """Raises unless it has all fields that are required, and no others."""
    kubernetes.validate(document, kubernetes.latest_version(), strict=True)


@pytest.mark.parametrize("number", [0, 1])
def test_the_job(number: int) -> None:
    document = documents("job.yaml")[number]
    valid(document)
    document["spec"]["complete"] = 2
    with pytest.raises(kubernetes.ValidationError):
        valid(document)


def test_the_jobs_of_the_runtime() -> None:
    """The schema of Kubeflow's own kind is not part of Kubernetes; the jobs that it makes are."""
    (runtime,) = documents("training_runtime.yaml")
    for item in runtime["spec"]["template"]["spec"]["replicatedJobs"]:
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": item["name"]}}
        valid({**job, "spec": item["template"]["spec"]})
