from __future__ import annotations

from typing import Dict, List

import pytest

from ringcomm.config import Settings
from ringcomm.errors import ConfigError
from ringrun.environment import MEMBERSHIP, forwarded, own_variables, removed

HERE = {
    "A": "1",
    "NCCL_X": "x",
    "NCCL_Y": "y",
    "RINGCOMM_KEY": "secret",
    "RINGCOMM_TRACE": "t",
    "RINGCOMM_TIMEOUT": "9",
}


@pytest.mark.parametrize(
    ("requests", "found"),
    [
        (["A"], {"A": "1"}),
        (["A=2", "B="], {"A": "2", "B": ""}),
        (["NCCL_*"], {"NCCL_X": "x", "NCCL_Y": "y"}),
        (["A=x=y"], {"A": "x=y"}),
        (["RINGCOMM_*"], {"RINGCOMM_TRACE": "t", "RINGCOMM_TIMEOUT": "9"}),
    ],
)
def test_forwarded(requests: List[str], found: Dict[str, str]) -> None:
    assert forwarded(requests, HERE) == found


@pytest.mark.parametrize(
    ("request_", "word"),
    [
        ("C", "-x C=VALUE"),
        ("1A=2", "'1A'"),
        ("a b", "neither"),
        ("NOTHING_*", "no variable that is set here fits"),
        ("RINGCOMM_KEY", "its own"),
        ("RINGCOMM_KEY=1", "its own"),
    ],
)
def test_bad_requests(request_: str, word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        forwarded([request_], HERE)
    assert word in str(caught.value)
    assert "secret" not in str(caught.value)


def test_own_variables() -> None:
    assert own_variables(Settings(timeout_s=9.0, verbose=True), HERE) == {
        "RINGCOMM_TRACE": "t",
        "RINGCOMM_TIMEOUT": "9.0",
        "RINGCOMM_VERBOSE": "1",
    }


def test_ranks_lose_what_belongs_to_another_job() -> None:
    assert set(MEMBERSHIP) < set(removed())
    assert {"RINGCOMM_KEY", "RINGCOMM_KEY_FD", "RINGCOMM_SLOT", "RINGCOMM_TIMEOUT"} < set(removed())
