"""PyTorch's own tests of what larger models use: pipelines, DTensor, FSDP2, checkpoints, collectives.

    python tests/adapters/torch_distributed/torchs_files.py [--backend gloo] [FILE[::PATTERN] ...]
    python tests/adapters/torch_distributed/torchs_files.py --table [FILE ...]

These files are not in PyTorch's wheel. They come from the source package of PyTorch 2.6 in Debian, which is
fetched once, compared with its hash and unpacked into a folder that git ignores; --tree takes a folder with
the sources of another version. FILE is a path below ``test/distributed``; without one, FILES are run. PATTERN
is for names of tests. Tests of threads and of single processes, which use no backend, are left out. Prints a
line of JSON per test, as torchs_own.py does, and with --table what became of each file over both backends.

The tests are written for GPUs and NCCL. So that they run on CPUs, their source is changed while it is loaded
(``REPLACED``), decorators that ask for GPUs let every test pass, and CUDA's streams are switched off.
What fails over Gloo too counts as not possible on CPUs, or with this version.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import unittest
import urllib.error
import urllib.request
import warnings
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "launcher")]

from tests.adapters.torch_distributed import torchs_own  # noqa: E402 - it needs the path

PACKAGE = "http://deb.debian.org/debian/pool/main/p/pytorch/pytorch_2.6.0+dfsg.orig.tar.xz"
SHA256 = "099a9601bc40d67656e75735c44abedb0fbe92d08817852ab7472eebb7e6ddff"
PARTS = ("test/distributed/", "test/inductor/test_aot_inductor_utils.py")
KEPT = ROOT / ".torchs-tests"
LIMIT_S = 180
"""For one test."""

FILES = """
    pipelining/test_schedule_multiproc.py pipelining/test_stage.py
    tensor/parallel/test_parallelize_api.py tensor/parallel/test_tp_examples.py
    tensor/parallel/test_tp_random_state.py tensor/parallel/test_tp_style.py
    _tensor/test_api.py _tensor/test_convolution_ops.py
    _tensor/test_dtensor.py _tensor/test_dtensor_compile.py _tensor/test_embedding_ops.py
    _tensor/test_experimental_ops.py _tensor/test_init.py _tensor/test_math_ops.py _tensor/test_matrix_ops.py
    _tensor/test_optimizers.py
    _tensor/test_random_ops.py _tensor/test_redistribute.py _tensor/test_tensor_ops.py _tensor/test_utils.py
    _tensor/test_view_ops.py _tensor/debug/test_comm_mode_features.py _tensor/experimental/test_local_map.py
    _tensor/experimental/test_register_sharding.py _tensor/experimental/test_tp_transform.py
    _composable/fsdp/test_fully_shard_autograd.py _composable/fsdp/test_fully_shard_clip_grad_norm_.py
    _composable/fsdp/test_fully_shard_comm.py _composable/fsdp/test_fully_shard_compile.py
    _composable/fsdp/test_fully_shard_extensions.py _composable/fsdp/test_fully_shard_frozen.py
    _composable/fsdp/test_fully_shard_mixed_precision.py _composable/fsdp/test_fully_shard_state_dict.py
    _composable/fsdp/test_fully_shard_training.py
    _composable/test_composability/test_2d_composability.py
    _composable/test_composability/test_pp_composability.py
    checkpoint/test_checkpoint.py checkpoint/test_dtensor_checkpoint.py checkpoint/test_dtensor_resharding.py
    checkpoint/test_file_system_checkpoint.py checkpoint/test_file_system_checkpoint_cpu.py
    checkpoint/test_format_utils.py checkpoint/test_fsdp_model_state.py checkpoint/test_fsdp_optim_state.py
    checkpoint/test_fsdp_tp_checkpoint_conversion.py checkpoint/test_fsspec.py
    checkpoint/test_hsdp_checkpoint.py checkpoint/test_save_load_api.py checkpoint/test_state_dict.py
    checkpoint/test_state_dict_utils.py checkpoint/test_tp_checkpoint.py
    checkpoint/e2e/test_e2e_save_and_load.py checkpoint/e2e/test_fine_tuning.py checkpoint/e2e/test_fsdp_ep.py
    checkpoint/e2e/test_pipeline.py checkpoint/fsdp/test_fsdp_dsd.py
    test_functional_api.py test_c10d_functional_native.py test_inductor_collectives.py
    test_dynamo_distributed.py test_device_mesh.py test_collective_utils.py test_c10d_object_collectives.py
"""

REPLACED = (
    (r"\bMultiProcContinousTest\b", "MultiProcContinuousTest"),  # spelled so in PyTorch 2.6
    (r"torch\.cuda\.device_count\(\)", "4"),
    (r"cuda:\{[^}]*\}", "cpu"),
    (r"(['\"])cuda(:\d)?\1", r"\1cpu\1"),
    (r"\.cuda\([^()]*\)", ".cpu()"),
    (r"device=(self\.)?rank\b", "device='cpu'"),
    (r"device_ids=\[(self\.)?rank\]", "device_ids=None"),
    (r"(['\"])(cpu:gloo,cuda:)?nccl\1", r"\1gloo\1"),
    (r"\bnot TEST_(MULTIGPU|CUDA)\b", "False"),
    # What PyTorch has changed since 2.6.
    (r"\bPipeliningShapeError\b", "PipeliningMetadataError"),
    (r"\n +stage_index_to_group_rank=[^\n]*,(?=\n)", ""),
)
"""Patterns in the source of a test, and what stands there instead."""


class CannotFetch(Exception):
    """The sources cannot be had; the text says why."""


def tree() -> Path:
    """Return the folder ``test/distributed`` of PyTorch's sources, fetched if needed; CannotFetch if the
    package is not available or unexpected.
    """
    found = KEPT / "test" / "distributed"
    if found.exists():
        return found
    KEPT.mkdir(exist_ok=True)
    package = KEPT / "package.tar.xz"
    try:
        with urllib.request.urlopen(PACKAGE, timeout=60) as answer:
            package.write_bytes(answer.read())
    except (urllib.error.URLError, OSError) as error:
        raise CannotFetch(f"{PACKAGE}: {error}") from error
    digest = hashlib.sha256(package.read_bytes()).hexdigest()
    if digest != SHA256:
        raise CannotFetch(f"{PACKAGE} has the SHA-256 {digest}, not {SHA256}")
    with tarfile.open(package) as archive:
        for member in archive:
            _, _, path = member.name.partition("/")
            if member.isfile() and path.startswith(PARTS) and ".." not in path:
                target = KEPT / "unpacking" / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.extractfile(member).read())
    (KEPT / "unpacking" / "test").rename(KEPT / "test")
    (KEPT / "unpacking").rmdir()
    package.unlink()
    return found


def prepare(backend: str) -> None:
    """Let PyTorch's helpers for tests take a backend where they name Gloo, and no GPUs."""
    os.environ.update(
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(LIMIT_S), OMP_NUM_THREADS="1",
        PYTORCH_PRINT_REPRO_ON_FAILURE="0",
        RINGCOMM_KEY=os.environ.get("RINGCOMM_KEY", "5eed" * 16),
    )  # fmt: skip
    warnings.simplefilter("ignore")
    import torch
    import torch.distributed as dist

    import ringcomm.torch.distributed  # noqa: F401

    torch.set_num_threads(1)
    torch.multiprocessing.set_start_method("fork")
    _replace_backend(dist, backend)
    from torch.testing._internal import common_cuda, common_distributed

    def let_pass(*_: Any, **__: Any) -> Any:
        return lambda test: test

    for name in ("skip_if_lt_x_gpu", "requires_nccl", "requires_nccl_version"):
        setattr(common_distributed, name, let_pass)
    common_distributed.skip_if_no_gpu = lambda test: test
    common_distributed.TIMEOUT_OVERRIDE.clear()
    common_distributed.MultiProcessTestCase._spawn_processes = lambda self: self._start_processes(
        torch.multiprocessing.get_context("fork").Process
    )
    common_distributed.MultiProcContinuousTest.world_size = 2
    common_cuda.TEST_MULTIGPU = True
    from torch.distributed.pipelining import schedules
    from torch.testing._internal import common_fsdp
    from torch.testing._internal.distributed._tensor import common_dtensor

    common_dtensor.skip_if_lt_x_gpu = let_pass
    common_fsdp.DEVICE_COUNT = 4
    common_fsdp.test_compiled_fsdp = let_pass
    common_fsdp.FSDPTest._run = vars(common_fsdp.FSDPTestMixin)["_run"]  # which does not count accelerators
    # Schedules did not scale gradients in PyTorch 2.6.
    schedules._PipelineSchedule.scale_grads = property(lambda self: False, lambda self, value: None)
    for name in ("set_device", "synchronize", "manual_seed", "empty_cache", "reset_peak_memory_stats"):
        setattr(torch.cuda, name, lambda *_, **__: None)


def _replace_backend(dist: Any, backend: str) -> None:
    """Let calls that ask for Gloo or for the default backend get this one."""

    def replaced(call: Any, first: bool) -> Any:
        def changed(*arguments: Any, **named: Any) -> Any:
            if first and arguments:
                named["backend"], arguments = arguments[0], arguments[1:]
            asked = named.get("backend")
            if asked in ("gloo", "cpu:gloo", "cpu:gloo,cpu:gloo") or (asked is None and first):
                named["backend"] = backend
                named.pop("pg_options", None)
                named.pop("device_id", None)
            return call(*arguments, **named)

        return changed

    for name, first in (("init_process_group", True), ("new_group", False)):
        call = replaced(getattr(dist, name), first)
        setattr(dist, name, call)
        setattr(dist.distributed_c10d, name, call)


def load(path: Path) -> Any:
    """A file of tests as a module, for CPUs."""
    source = path.read_text()
    for pattern, instead in REPLACED:
        source = re.sub(pattern, instead, source)
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_loader(path.stem, loader=None, origin=str(path))
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(path)
    sys.modules[path.stem] = module
    exec(compile(source, str(path), "exec"), vars(module))
    return module


def cases_in(module: Any) -> Iterator[Any]:
    """The tests of a module that start processes with a backend, or one."""
    from torch.testing._internal import common_distributed as common

    kinds = (
        common.MultiProcessTestCase,
        common.MultiProcContinuousTest,
        common.DynamoDistributedSingleProcTestCase,
    )
    for suite in unittest.defaultTestLoader.loadTestsFromModule(module):
        for case in suite:
            if isinstance(case, kinds) and type(case).__module__ == module.__name__:
                yield case


class Report(torchs_own.Report):
    """Prints what became of each test, and ends processes that outlived one that failed."""

    def report(self, test: Any, outcome: str, why: str = "") -> None:
        if isinstance(test, unittest.TestCase):
            lines = [line for line in why.splitlines() if line.strip() and not line[0].isspace()]
            super().report(test, outcome, lines[-1][:300] if lines else "")
        if outcome != "passed" and getattr(test, "_processes_spawned", False):
            for process in type(test).processes:
                process.kill()
            type(test)._processes_spawned = type(test).poison_pill = False


def run_file(path: Path, only: str, backend: str) -> int:
    """Run the tests of a file in this process; prints what became of them."""
    prepare(backend)
    result = Report()
    cases = [case for case in cases_in(load(path)) if fnmatch(case.id().rpartition(".")[2], only or "*")]
    unittest.TestSuite(cases).run(result)
    print(", ".join(f"{count} {outcome}" for outcome, count in result.counts.items()), flush=True)
    return 1 if result.counts["failed"] else 0


Outcomes = Dict[str, Tuple[str, str]]


def outcomes_of(file: str, backend: str, folder: Path) -> Outcomes:
    """Run a file in a process of its own: outcome and reason by test."""
    command = [sys.executable, __file__, "--backend", backend, "--tree", str(folder), file]
    done = subprocess.run(command, text=True, capture_output=True)
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    if not reports and done.returncode:
        return {"the file": ("failed", done.stderr.strip().splitlines()[-1])}
    return {name: (outcome, why) for name, outcome, _, why in reports}


def compare(files: List[str], folder: Path) -> int:
    """Print a table of what passed over both backends, and every test that did so over Gloo only."""
    print("| file | tests | Gloo passes | ringcomm passes | neither, skipped or failed |")
    print("| --- | ---: | ---: | ---: | ---: |")
    worse: List[str] = []
    for file in files:
        gloo, ring = (outcomes_of(file, backend, folder) for backend in ("gloo", "ringcomm"))
        passed = [
            {name for name, (outcome, _) in found.items() if outcome == "passed"} for found in (gloo, ring)
        ]
        neither = set(gloo) | set(ring)
        neither -= passed[0] | passed[1]
        print(f"| {file} | {len(gloo)} | {len(passed[0])} | {len(passed[1])} | {len(neither)} |", flush=True)
        worse += [f"{file}::{name}: {ring.get(name, ('', 'not run'))[1]}" for name in passed[0] - passed[1]]
    print("\n".join(["", *worse]))
    return 1 if worse else 0


def main(arguments: List[str]) -> int:
    """Run them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", choices=("ringcomm", "gloo"), default="ringcomm")
    parser.add_argument("--tree", type=Path, help="the folder test/distributed of PyTorch's sources")
    parser.add_argument("--table", action="store_true", help="compare both backends")
    parser.add_argument("files", nargs="*", default=FILES.split())
    options = parser.parse_args(arguments)
    try:
        folder = options.tree or tree()
    except CannotFetch as error:
        print(f"PyTorch's tests cannot be had: {error}", file=sys.stderr)
        return 2
    if options.table:
        return compare(options.files, folder)
    if len(options.files) == 1:
        file, _, only = options.files[0].partition("::")
        return run_file(folder / file, only, options.backend)
    code = 0
    for file in options.files:
        print(file, flush=True)
        command = [sys.executable, __file__, "--backend", options.backend, "--tree", str(folder), file]
        code = subprocess.run(command).returncode or code
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
