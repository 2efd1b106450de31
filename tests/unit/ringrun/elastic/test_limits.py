from __future__ import annotations

from dataclasses import replace
from typing import Any, Dict

import pytest

from ringcomm.errors import ConfigError
from ringrun.elastic.limits import HostLimits, check_limits, failed_text, timeout_text


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_np": 3},
        {"min_np": 1, "max_np": 4},
    ],
)
def test_limits_that_agree(changes: Dict[str, Any]) -> None:
    limits = replace(HostLimits(3, 3), **changes)
    assert check_limits(limits) is limits


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"max_np": 2}, "--max-np 2 is less than --min-np 3"),
        ({"min_np": 4}, "-np 3 is less than --min-np 4"),
        ({"min_np": 1, "max_np": 2}, "-np 3 is more than --max-np 2"),
    ],
)
def test_limits_that_contradict_each_other(changes: Dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_limits(replace(HostLimits(3, 3), **changes))
    assert text in str(caught.value)


@pytest.mark.parametrize("horovod, name", [(True, "Horovod"), (False, "ringrun")])
def test_texts_that_programs_search_for(horovod: bool, name: str) -> None:
    limits = HostLimits(3, 2, timeout_s=12.5, horovod=horovod)
    failed = failed_text(limits, "jetson1", 1, 7)
    assert failed.startswith(f"{name} detected that one or more processes exited with non-zero status")
    assert failed.endswith("Process name: jetson1[1]\nExit code: 7")
    late = timeout_text(limits, 2)
    assert f"at least 2 {name} processes" in late and late.endswith("Timeout after 12.5 seconds.")
