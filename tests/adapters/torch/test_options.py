"""Forms x options of PyTorch's package, on ranks that are threads."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import ringcomm.torch as hvd  # noqa: E402 - the adapter needs torch
from tests.adapters.signatures import functions_of  # noqa: E402
from tests.support.options import compare_forms, sets_of  # noqa: E402


@pytest.mark.parametrize("size", [2, 3])
def test_every_form_with_every_option(ranks_of, size):
    names = functions_of("ringcomm.torch")

    def work(context):
        sets = [hvd.add_process_set(ranks) for ranks in sets_of(size)]
        calls = 0
        for each in (hvd.global_process_set, *sets):
            members = list(range(size)) if each is hvd.global_process_set else each.ranks
            if context.rank in members:
                calls += compare_forms(hvd, names, members, context.rank, each, torch.tensor, np.asarray)
        hvd.barrier()
        return calls

    assert min(ranks_of(size, work)) > 100
