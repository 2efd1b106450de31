from __future__ import annotations

from typing import Any, Dict

import pytest

from ringcomm.errors import ConfigError
from ringrun.elastic.limits import HostLimits
from ringrun.elastic.options import fixed_hosts, limits_of, refuse_without_effect
from ringrun.plan.hosts import HostSpec
from ringrun.plan.options import Options


@pytest.mark.parametrize(
    ("options", "is_elastic"),
    [({}, False), ({"max_np": 3}, False), ({"min_np": 1}, True), ({"host_discovery_script": "./h"}, True)],
)
def test_what_makes_a_job_elastic(options: Dict[str, Any], is_elastic: bool) -> None:
    assert Options(**options).is_elastic is is_elastic


@pytest.mark.parametrize(
    ("options", "limits"),
    [
        (Options(min_np=2), HostLimits(2, 2)),
        (Options(np=3, min_np=2, max_np=4), HostLimits(3, 2, 4)),
        (Options(host_discovery_script="./hosts.sh"), HostLimits(1, 1, script="./hosts.sh")),
        (Options(np=4, host_discovery_script="./hosts.sh", slots_per_host=2),
         HostLimits(4, 4, script="./hosts.sh", slots=2)),
        (Options(min_np=1, horovod=True), HostLimits(1, 1, horovod=True)),
    ],
)  # fmt: skip
def test_limits(options: Options, limits: HostLimits) -> None:
    assert limits_of(options) == limits


def test_an_option_that_would_have_no_effect() -> None:
    with pytest.raises(ConfigError, match="^--max-np needs --min-np or --host-discovery-script"):
        refuse_without_effect(Options(max_np=3))
    refuse_without_effect(Options(min_np=1, max_np=3))


@pytest.mark.parametrize(
    ("options", "slots"),
    [(Options(np=3, min_np=1), 3), (Options(min_np=1, max_np=4), 4), (Options(min_np=2), 2)],
)
def test_without_a_list_the_host_is_this_machine(options: Options, slots: int) -> None:
    assert fixed_hosts(options, []) == [HostSpec("localhost", slots=slots)]


@pytest.mark.parametrize(
    ("specs", "np", "text"),
    [
        ([HostSpec("a")], 2, "The hosts have 1 slot, but the job needs 2"),
        ([HostSpec("a"), HostSpec("b")], None, "The hosts have 2 slots, but the job needs 3"),
    ],
)
def test_too_few_slots(specs: Any, np: Any, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fixed_hosts(Options(np=np, min_np=3), specs)
    assert text in str(caught.value)
