"""Variables that only the launching shell has, and ranks that train alone: ringrun says so.

`--via env` stands for other hosts: their environment lacks the variables that it removes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Tuple

import pytest

from tests.proc.test_ringrun_support import ringrun

TRAIN = """
import os
EARLY = int(os.environ.get("EARLY", 1))
import argparse
import click
import numpy as np
import ringcomm as rc

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=os.environ.get("STEPS", "5"))
steps = parser.parse_args().steps

@click.command()
@click.option("--rate", type=float, default=0.1, envvar="RATE")
def main(rate):
    rc.init()
    token = os.getenv("MY_TOKEN")
    everything = dict(os.environ)
    for step in range(steps):
        rc.allreduce(np.ones(3) * rate)
    print("done", "LATE" in os.environ)

main()
"""
NAMES = ("EARLY", "STEPS", "RATE", "MY_TOKEN", "LATE", "UNREAD")
VIA = f"env {' '.join('-u ' + name for name in NAMES)} AT={{host}}"
HOSTS = ("-np", "3", "-H", "localhost,b,c", "--via", VIA)
INTRO = "the program reads variables that are not the same on all hosts: "


def train(tmp_path: Path, *options: str, **env: str) -> Tuple[int, str]:
    (tmp_path / "train.py").write_text(TRAIN)
    job = ringrun(*options, "train.py", cwd=tmp_path, env=env)
    return job.process.returncode, job.err


def test_a_rate_that_only_the_launching_shell_has_is_told_although_the_job_succeeds(tmp_path: Path) -> None:
    values = {"EARLY": "2", "RATE": "0.7", "LATE": "yes", "MY_TOKEN": "hush", "UNREAD": "9"}
    code, err = train(tmp_path, *HOSTS, **values)
    assert code == 0, err
    lines = [line for line in err.splitlines() if "not the same on all hosts" in line]
    text = " ".join(lines)
    assert "RATE is 0.7 on localhost and not set on b, c" in text, err
    assert "EARLY is 2 on localhost and not set on b, c" in text, err
    assert "MY_TOKEN is set on localhost and not set on b, c" in text and "hush" not in err, err
    assert "LATE is yes on localhost and not set on b, c" in text and "UNREAD" not in err, err
    assert all(text.count(f"{name} is ") == 1 for name in ("RATE", "EARLY", "MY_TOKEN", "LATE")), err


def test_the_box_names_the_variable_because_of_which_a_rank_ended_early(tmp_path: Path) -> None:
    code, err = train(tmp_path, *HOSTS, STEPS="9")
    box = err[err.index("╭─ ringrun") :]
    assert code != 0
    assert f"│ {INTRO.capitalize()}STEPS is 9 on localhost and not set on b, c. All ranks get" in box, err
    assert box.index("-x STEPS") < box.index("has finished") and "model.join()" in box, err


@pytest.mark.full
@pytest.mark.parametrize("options", [(*HOSTS, "-x", "STEPS", "-x", "RATE"), ("-np", "2"), HOSTS])
def test_hosts_that_agree_get_no_such_line(tmp_path: Path, options: Tuple[str, ...]) -> None:
    values = {} if options is HOSTS else {"STEPS": "4", "RATE": "0.2"}
    code, err = train(tmp_path, *options, **values)
    assert code == 0 and "not the same" not in err and "trained alone" not in err, err


ALONE = "ringrun: no rank called ringcomm.init(): each trained alone"


def test_ranks_that_call_init_and_nothing_else_have_trained_alone(tmp_path: Path) -> None:
    (tmp_path / "inits.py").write_text("import ringcomm\nringcomm.init()\n")
    job = ringrun("-np", "2", "inits.py", cwd=tmp_path)
    assert job.process.returncode == 0 and "every rank called init(), and none made" in job.err, job.err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("-np", "2", "plain.py"), 1),
        *(
            pytest.param(("-np", *words.split()), told, marks=pytest.mark.full)
            for words, told in [
                (f"2 {sys.executable} plain.py", 1),
                ("2 -m plain", 0),
                ("1 plain.py", 0),
                ("2 -q plain.py", 0),
                ("2 true", 0),
                (f"2 {sys.executable} -c print(1)", 0),
                ("2 inits.py", 0),
                ("2 outside.py", 0),
            ]  # fmt: skip
        ),
    ],
)
def test_ranks_that_never_call_init_have_trained_alone(
    tmp_path: Path, options: Tuple[str, ...], told: int
) -> None:
    (tmp_path / "plain.py").write_text("import ringcomm\n")
    (tmp_path / "inits.py").write_text("import ringcomm\nringcomm.init()\n")
    child = "subprocess.call([sys.executable, 'inits.py'], close_fds=False)"
    (tmp_path / "outside.py").write_text(f"import subprocess, sys\nsys.exit({child})\n")
    job = ringrun(*options, cwd=tmp_path)
    assert job.process.returncode == 0 and job.err.count(ALONE) == told, job.err
