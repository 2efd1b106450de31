"""What the environments of ringrun and torchrun say about a process's part in a job."""

from __future__ import annotations

from typing import Dict, Optional, Tuple

import pytest

from ringcomm.configuration.variables import MEMBERSHIP_VARIABLES, env_rendezvous, launchers_rank, torchrun

RINGRUN = {
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "4", "RANK": "2", "RINGCOMM_SIZE": "4",
    "RINGCOMM_MASTER": "10.0.0.1,29500,4",
}  # fmt: skip


def test_each_variable_is_described_once():
    names = [name for name, _ in MEMBERSHIP_VARIABLES]
    assert len(set(names)) == len(names)
    assert all(text.endswith(".") for _, text in MEMBERSHIP_VARIABLES)


@pytest.mark.parametrize(
    ("environ", "size", "found"),
    [
        ({}, 2, (False, "")),
        ({"WORLD_SIZE": "x", "MASTER_ADDR": "a"}, 2, (False, "")),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "a"}, 3, (False, "")),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"}, 4, (False, "a")),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "a"}, 2, (True, "a")),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, 4, (True, "")),
    ],
)
def test_torchrun(environ: Dict[str, str], size: int, found: Tuple[bool, str]):
    assert torchrun(environ, size) == found


@pytest.mark.parametrize(
    ("change", "rank"),
    [
        ({}, 2),
        ({"MASTER_PORT": "29501"}, None),  # the program has set another meeting point
        ({"RINGCOMM_MASTER": ""}, None),
        ({"WORLD_SIZE": "2", "RINGCOMM_MASTER": "10.0.0.1,29500,2"}, None),  # not this job's size
        ({"RANK": ""}, None),
        ({"RANK": "two"}, None),
        ({"WORLD_SIZE": "1", "RINGCOMM_SIZE": "1", "RINGCOMM_MASTER": "10.0.0.1,29500,1"}, None),
    ],
)
def test_the_launchers_rank_counts_while_its_variables_are_unchanged(
    change: Dict[str, str], rank: Optional[int]
):
    assert launchers_rank({**RINGRUN, **change}) == rank


def test_without_a_launcher_there_is_no_rank():
    assert launchers_rank({}) is None


def test_what_env_rendezvous_lacks():
    assert env_rendezvous(RINGRUN) == ([], 4)
    assert env_rendezvous({"WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}) == (["RANK"], 2)
    assert env_rendezvous({"WORLD_SIZE": "many", "RANK": ""})[1] == 1
