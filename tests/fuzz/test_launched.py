"""What ranks that srun or mpirun has started read: rank 0's file."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import strategies as st

from ringcomm.config import Membership
from ringcomm.errors import StartupError
from ringcomm.rendezvous import launched
from tests.fuzz.cases import at_most, damaged, fuzz, values

pytestmark = pytest.mark.release

NOTICE = {
    "job": "launched-1", "key": "ab" * 32, "certificate": "", "machine": "m",
    "endpoints": [["10.0.0.1", 4000], ["fd00::1", 4000]],
}  # fmt: skip
notices = st.one_of(
    damaged(st.just(json.dumps(NOTICE).encode())).map(lambda data: data.decode("utf-8", "replace")),
    values.map(json.dumps),
    st.sampled_from(sorted(NOTICE)).flatmap(
        lambda name: st.one_of(values, st.integers(), st.lists(st.integers())).map(
            lambda value: json.dumps({**NOTICE, name: value})
        )
    ),
)


@fuzz(notices)
def test_what_rank_0_has_published(text):
    membership = Membership(size=2, rank=1)
    with at_most(1 << 20), contextlib.suppress(StartupError):
        full = launched._with_notice(membership, text, "a file")
        assert all(isinstance(host, str) and 0 < port < 65536 for host, port in full.rendezvous)
        assert isinstance(full.key, bytes)
