from __future__ import annotations

from typing import List

import pytest

from ringcomm.errors import ConfigError
from ringrun.plan.hostlist import MAX_HOSTS, expand, tasks_per_node


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("jetson1", ["jetson1"]),
        ("jetson[1-2]", ["jetson1", "jetson2"]),
        ("node[09-11,7],gpu1", ["node09", "node10", "node11", "node7", "gpu1"]),
        ("a[1-2]-ib[0,3]", ["a1-ib0", "a1-ib3", "a2-ib0", "a2-ib3"]),
        ("n[1-2]x,n3", ["n1x", "n2x", "n3"]),
        ("r[8-10]", ["r8", "r9", "r10"]),
        ("a,a", ["a", "a"]),
        ("node-a.example.org", ["node-a.example.org"]),
    ],
)
def test_lists(text: str, names: List[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize(
    "text", ["", "a,", ",a", "a[", "a]", "a[1-2", "a[[1]]", "a[x]", "a[2-1]", "a[]", "a[1-", "n[1-1000000]"]
)
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="list of nodes"):
        expand(text)


@pytest.mark.parametrize("text", ["a[1-60000],b[1-60000]", "a[1-300][1-300]"])
def test_a_list_without_end_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=str(MAX_HOSTS)):
        expand(text)


@pytest.mark.parametrize(
    ("text", "counts"), [("3,1", [3, 1]), ("2(x3),1", [2, 2, 2, 1]), ("4", [4]), ("1(x2)", [1, 1])]
)
def test_tasks(text: str, counts: List[int]) -> None:
    assert tasks_per_node(text) == counts


@pytest.mark.parametrize("text", ["", "x", "2(x)", "2x3", "2(x3", "1,,2", "1(x999999)"])
def test_what_is_no_number_of_tasks_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="tasks per node"):
        tasks_per_node(text)
