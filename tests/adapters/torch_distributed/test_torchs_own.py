"""A part of PyTorch's own tests for backends; ``torchs_own.py`` runs all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("expecttest")

SELECTION = """
    Backend_enum_class DistributedDataParallelCPU DistributedDataParallelCPU_grad_is_view
    accumulate_gradients_no_sync accumulate_gradients_no_sync_allreduce_with_then_hook
    all_gather_coalesced_with_empty all_gather_complex all_gather_full_group all_gather_object_subgroup
    all_reduce_coalesced_full_group_product all_reduce_coalesced_max_complex_unsupported
    all_reduce_complex_unsupported_ops
    all_reduce_full_group_max all_reduce_sum_async all_reduce_sum_complex all_to_all all_to_all_complex
    all_to_all_single_equal_split_full_group all_to_all_single_unequal_split barrier_timeout_full_group
    batch_isend_irecv_gloo_tags broadcast_full_group ddp_create_graph ddp_logging_data_cpu destroy_group
    gather gather_checks get_future get_rank_size_group grads_same_across_ranks_with_no_sync isend
    monitored_barrier_gloo_rank_0_timeout monitored_barrier_gloo_subgroup reduce_product reduce_sum_twice
    scatter_checks scatter_object_list send_recv_any_source send_recv_with_tag_torch_profiler
    sparse_all_reduce_sum static_graph_api_cpu
"""


@pytest.mark.release
def test_what_pytorch_tests_with_gloo() -> None:
    program = Path(__file__).with_name("torchs_own.py")
    names = [f"test_{name}" for name in SELECTION.split()]
    done = subprocess.run([sys.executable, str(program), *names], text=True, timeout=300, capture_output=True)
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert {name: why for name, outcome, _, why in reports if outcome != "passed"} == {}, done.stderr
    assert len(reports) == len(names)
    assert done.returncode == 0
