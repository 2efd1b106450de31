"""Importing ringcomm is quick and brings in no framework; each measurement is a fresh interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FRAMEWORKS = ["torch", "tensorflow", "keras", "jax", "mlx", "mxnet", "cupy", "lightning", "horovod", "mpi4py"]
FRAMEWORKS += ["ray", "distributed", "dask", "pyspark"]

MAX_MODULES = 110
"""What a process that is alone in its job needs for its collectives."""

PROBE = """
import json, sys, time
started = time.process_time()
import numpy
before, numpy_done = set(sys.modules), time.process_time()
import ringcomm
done = time.process_time()
new = sorted(set(sys.modules) - before)
print(json.dumps({"numpy_s": numpy_done - started, "ringcomm_s": done - numpy_done, "new": new}))
"""


def fresh(program: str) -> str:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RINGCOMM_")}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # compiling everything each time is not what users wait for
    environ["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-c", program]
    return subprocess.run(
        command, env=environ, check=True, stdout=subprocess.PIPE, text=True, timeout=60
    ).stdout


@pytest.fixture(scope="module")
def measurements():
    return [json.loads(fresh(PROBE)) for _ in range(7)]


def test_no_framework_is_imported(measurements):
    loaded = {name.split(".")[0] for name in measurements[0]["new"]}
    assert "ringcomm" in loaded
    assert loaded & set(FRAMEWORKS) == set()
    third_party = (
        loaded - set(getattr(sys, "stdlib_module_names", loaded)) - {"ringcomm", "cloudpickle", "numpy"}
    )
    assert third_party == set()


def test_what_a_collective_does_not_need_is_not_imported(measurements):
    loaded = {name for name in measurements[0]["new"] if name.split(".")[0] == "ringcomm"}
    rooms = {name.split(".")[1] for name in loaded if "." in name}
    assert rooms & {"balance", "rendezvous", "elastic", "_adapter"} == set()
    assert len(loaded) <= MAX_MODULES, sorted(loaded)


def test_importing_is_quick(measurements):
    """Compared with importing NumPy in the same process, in processor time, so that load does not matter."""
    for item in measurements:
        print(f"NumPy {item['numpy_s'] * 1000:.0f} ms, ringcomm after it {item['ringcomm_s'] * 1000:.0f} ms")
    assert min(item["ringcomm_s"] / item["numpy_s"] for item in measurements) < 1.5


def test_frameworks_that_are_broken_do_not_matter():
    """Even where importing a framework fails, ringcomm works."""
    blocked = "\n".join(f"sys.modules[{name!r}] = None" for name in FRAMEWORKS)
    program = (
        f"import sys\n{blocked}\nimport numpy, ringcomm as rc\nrc.init()\nprint(rc.allreduce(numpy.ones(2)))"
    )
    assert fresh(program) == "[1. 1.]\n"


def test_importing_has_no_side_effects():
    program = (
        "import logging, signal, sys, threading, warnings\n"
        "handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)]\n"
        "hook, filters = sys.excepthook, list(warnings.filters)\n"
        "import numpy\n"
        "filters = list(warnings.filters)\n"
        "import ringcomm\n"
        "print([signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)] == handlers,\n"
        "      sys.excepthook is hook, warnings.filters == filters, threading.active_count(),\n"
        "      logging.getLogger().handlers)"
    )
    assert fresh(program) == "True True True 1 []\n"
