from __future__ import annotations

from pathlib import Path
from typing import Dict, List

import pytest

from ringrun.agent import threads

BLAS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")


@pytest.mark.parametrize(
    ("wanted", "ranks", "cores", "expected"),
    [
        ("auto", 2, 8.0, 4), ("auto", 3, 8.0, 2), ("auto", 4, 2.0, 1), ("auto", 2, 3.5, 1),
        ("auto", 1, 8.0, 0), ("none", 4, 8.0, 0), ("3", 4, 8.0, 3), ("5", 1, 8.0, 5),
    ],
)  # fmt: skip
def test_share_of_the_cores(wanted: str, ranks: int, cores: float, expected: int) -> None:
    env: Dict[str, str] = {}
    facts = threads.limit(env, wanted, ranks, cores)
    assert facts["threads"] == expected
    assert set(env.values()) == ({str(expected)} if expected else set())
    assert not expected or {*BLAS, "TF_NUM_INTRAOP_THREADS", "PJRT_NPROC"} < set(env)


def test_a_variable_that_is_set_stays_and_those_that_follow_it_are_not_set() -> None:
    env = {"OMP_NUM_THREADS": "6", "MKL_NUM_THREADS": "3", "TF_NUM_INTEROP_THREADS": "2"}
    facts = threads.limit(env, "auto", 2, 4.0)
    assert env["OMP_NUM_THREADS"] == "6" and env["MKL_NUM_THREADS"] == "3"
    assert "OPENBLAS_NUM_THREADS" not in env and "BLIS_NUM_THREADS" not in env
    assert env["TF_NUM_INTRAOP_THREADS"] == "2"
    assert facts["kept"] == {"OMP_NUM_THREADS": "6", "MKL_NUM_THREADS": "3"}


def test_the_line_names_hosts_numbers_and_the_option() -> None:
    env = {"OMP_NUM_THREADS": "6"}
    hosts = {"a": threads.limit({}, "auto", 2, 4.0), "b": threads.limit({}, "auto", 1, 4.0),
             "c": threads.limit(env, "auto", 3, 2.5)}  # fmt: skip
    assert threads.describe(hosts, "auto").startswith(
        "2 threads per rank on a (4 cores, 2 ranks); 1 thread per rank on c (2.5 cores, 3 ranks, "
        "OMP_NUM_THREADS=6 is kept). --threads N sets another number"
    )


def test_nothing_is_said_of_what_the_user_has_asked_for() -> None:
    assert threads.describe({"a": threads.limit({}, "3", 2, 4.0)}, "3") == ""
    assert threads.describe({"a": threads.limit({}, "none", 2, 4.0)}, "none") == ""
    assert "OMP_NUM_THREADS=1 is kept" in threads.describe(
        {"a": threads.limit({"OMP_NUM_THREADS": "1"}, "3", 2, 4.0)}, "3"
    )


@pytest.mark.parametrize(
    ("lines", "files", "expected"),
    [
        (["0::/a/b"], {"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000"}, [1.5]),
        (["0::/gone"], {"cpu.max": "50000 100000"}, [0.5]),
        (["0::/../out"], {"cpu.max": "200000 100000"}, [2.0]),
        (["4:cpu,cpuacct:/d"],
         {"cpu,cpuacct/d/cpu.cfs_quota_us": "300000", "cpu,cpuacct/d/cpu.cfs_period_us": "100000"}, [3.0]),
        (["4:cpu,cpuacct:/d"], {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, []),
        (["2:memory:/d", "nonsense", ""], {"cpu.max": "garbage"}, []),
    ],
)  # fmt: skip
def test_quotas_of_cgroups(
    tmp_path: Path, lines: List[str], files: Dict[str, str], expected: List[float]
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content + "\n")
    assert threads.quotas(lines, str(tmp_path)) == expected
