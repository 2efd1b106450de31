from __future__ import annotations

import re
from pathlib import Path
from typing import List

import click
import pytest
from click.testing import CliRunner

from ringrun import cli
from ringrun.flags import nearest_option
from ringrun.plan.launchers import names, rule_of, translate

HOROVOD_PAGE = Path(__file__).resolve().parents[4] / "docs" / "horovod.md"
OWN = {"-np": 1, "-H": 1, "--hostfile": 1, "-x": 1, "--iface": 1, "--bind": 1, "--verbose": 0, "--ssh": 1}


def words(line: str) -> List[str]:
    return translate(line.split(), OWN.get).words


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        # The lines of the articles that people copy.
        ("-np 2 -H localhost:2 -bind-to none -map-by slot python mxnet_mnist.py",
         "-np 2 -H localhost:2 --bind none python mxnet_mnist.py"),
        ("-n 2 python test_horovod.py", "-np 2 python test_horovod.py"),
        ("\u2013n 8 python test_horovod.py", "-np 8 python test_horovod.py"),
        ("--allow-run-as-root -np 2 --hostfile /generated/hostfile python main.py",
         "-np 2 --hostfile /generated/hostfile python main.py"),
        ("-bind-to none -map-by slot -mca pml ob1 -mca btl ^openib python main.py",
         "--bind none python main.py"),
        ("-np 3 -H a:1,b:1 -x NCCL_DEBUG=INFO -x PATH --mca btl_tcp_if_include eth0 python x.py",
         "--iface eth0 -np 3 -H a:1,b:1 -x NCCL_DEBUG=INFO -x PATH python x.py"),
        # Interfaces: both of Open MPI's layers, and its usual exclusions.
        ("-mca oob_tcp_if_include eth0 -mca btl_tcp_if_include eth0 x.py", "--iface eth0 x.py"),
        ("-mca btl_tcp_if_exclude lo,docker0 x.py", "--iface !docker0 x.py"),
        ('-mca plm_rsh_args -p12345 x.py', "--ssh ssh -p12345 x.py"),
        # Numbers of ranks per host.
        ("-npernode 2 x.py", "--slots-per-host 2 x.py"),
        ("-N 2 x.py", "--slots-per-host 2 x.py"),
        ("--map-by ppr:4:node x.py", "--slots-per-host 4 x.py"),
        ("--nproc_per_node=4 --nnodes=2 --tee 3 train.py", "--slots-per-host 4 train.py"),
        # MPICH.
        ("-hosts a,b -ppn 2 -genv OMP_NUM_THREADS 1 -genvlist A,B x.py",
         "-H a,b --slots-per-host 2 -x OMP_NUM_THREADS=1 -x A -x B x.py"),
        ("-genvall x.py", "x.py"),
        ("-genvnone -genvlist A x.py", "--no-env -x A x.py"),
        ("-f machines -wdir /job x.py", "--hostfile machines --cwd /job x.py"),
        ("--bind-to core --tag-output x.py", "--bind core x.py"),
        # mlx.launch.
        ("-n 4 train.py", "-np 4 train.py"),
        ("--hosts mac1,mac2 --repeat-hosts 2 --backend ring --env A=1 --env=B=2 -env C 3 x.py",
         "-H mac1,mac2 --slots-per-host 2 -x A=1 -x B=2 -x C=3 x.py"),
        ("--hostfile hosts.json --starting-port 5000 --connections-per-ip 2 train.py",
         "--hostfile hosts.json train.py"),
        ("--env", "--env"),
        # The command's own options are its own.
        ("-np 2 python x.py -n 3 --bind-to core", "-np 2 python x.py -n 3 --bind-to core"),
        ("-np 2 -- -n", "-np 2 -- -n"),
        ("-np 2 -m pkg -n 3", "-np 2 -m pkg -n 3"),
        ("--iface jetson1=eth0 --mca btl_tcp_if_include eth1 x.py", "--iface eth1 --iface jetson1=eth0 x.py"),
        ("", ""),
        ("-np", "-np"),
        ("--mca key", "--mca key"),
        ("-np 2 --iface", "-np 2 --iface"),
        ("--fusion-threshold-mb 3 --cycle-time-ms 3.5 x.py", "--fusion-threshold 3M x.py"),
        ("--fusion-threshold-mb=0 --gloo x.py", "--fusion-threshold 0 x.py"),
        ("--stall-check-shutdown-time-seconds 3 --no-stall-check x.py", "--late-after 3 --late-after 0 x.py"),
        ("--timeline-filename t --timeline-mark-cycles x.py", "--timeline t x.py"),
        ("--timeline-filename DYNAMIC --blacklist-cooldown-range 1 2 x.py", "x.py"),
        ("--iface=en0 --mca btl_tcp_if_include eth1,en0 x.py", "--iface en0,eth1 x.py"),
        ("-mca btl_tcp_if_exclude lo x.py", "x.py"),
        ("--mca plm_rsh_agent rsh x.py", "--ssh rsh x.py"),
        ("--mca rmaps_base_oversubscribe 1 x.py", "--oversubscribe x.py"),
        ("--mca hwloc_base_binding_policy numa x.py", "--bind core x.py"),
        ("--bind-to package:report x.py", "--bind core x.py"),
        ("--bind-to l3cache x.py", "--bind core x.py"),
        ("--map-by core:PE=2 x.py", "x.py"),
    ],
)  # fmt: skip
def test_lines(line: str, expected: str) -> None:
    assert words(line) == expected.split() if "ssh -p" not in expected else "ssh -p12345" in words(line)


@pytest.mark.parametrize(
    ("line", "note"),
    [
        ("-map-by node x.py", "slot after slot"),
        ("--bind-to hwthread x.py", "bound to cores"),
        ("--report-bindings x.py", "--dry-run"),
        ("-timestamp-output x.py", "without a time"),
        ("--mca opal_cuda_support 1 x.py", "does not use MPI"),
        ("--bind-to boards x.py", "--bind-to boards is not done: ranks are not bound"),
        ("--nproc-per-node gpu x.py", "give a number"),
        ("--backend jaccl x.py", "connected by ringcomm"),
        ("--rdzv-endpoint=host:1 x.py", "run it once"),
        ("--autotune x.py", "--autotune has no effect: ringcomm does not tune itself"),
        ("--mca btl_tcp_if_include eth0 x.py", ""),
        ("--allow-run-as-root x.py", ""),
    ],
)
def test_notes_say_what_happens_instead(line: str, note: str) -> None:
    notes = translate(line.split(), OWN.get).notes
    assert len(notes) == bool(note)
    assert all(note in text for text in notes)


@pytest.mark.parametrize("line", ["--iface", "-np 2 --iface", "--mca btl_tcp_if_include"])
def test_an_option_at_the_end_without_its_value(line: str) -> None:
    result = CliRunner().invoke(cli.ringrun, line.split())
    assert result.exit_code == 2 and "Error: " in result.output, (result.output, result.exception)


@pytest.mark.parametrize("name", names())
def test_every_option_gives_options_that_ringrun_has(name: str) -> None:
    """No rule leads to an option that is itself refused."""
    line = translate([name, "3", "3", "x.py"], {"-np": 1}.get).words
    result = CliRunner().invoke(cli.ringrun, ["--dry-run", *line])
    assert "No such option" not in result.output, result.output


def test_the_page_says_what_becomes_of_horovodruns_flags() -> None:
    rows = [line.split("|")[1:3] for line in HOROVOD_PAGE.read_text().splitlines() if line.startswith("| `-")]
    own = {name for param in cli.ringrun.params if isinstance(param, click.Option) for name in param.opts}
    said = [(flag, text.strip()) for flags, text in rows for flag in re.findall(r"`(-[\w-]+)", flags)]
    for flag, text in said:
        rule = rule_of(flag)
        if text.startswith("an error"):
            refused = CliRunner().invoke(cli.ringrun, [flag, "3", "x"])
            assert refused.exit_code == 2 and "ringcomm has no MPI" in refused.output
        elif "no effect" in text or "without effect" in text:
            assert rule is not None and not rule.has_effect and bool(rule.note) == ("message" in text), flag
        else:
            assert flag in own or rule is not None and rule.has_effect, flag


OPTIONS = sorted(
    {name for param in cli.ringrun.params if isinstance(param, click.Option) for name in param.opts}
    | set(names())
)


def test_a_refused_option_gets_the_nearest_that_works() -> None:
    """For every option with a letter left out: no suggestion is itself refused, nor has no effect."""
    misspelt = {name[: len(name) // 2 + 1] + name[len(name) // 2 + 2 :] for name in OPTIONS if len(name) > 5}
    suggested = {nearest_option(word, OPTIONS) for word in misspelt - set(OPTIONS)} - {""}
    assert len(suggested) > 70 and suggested <= set(OPTIONS)


@pytest.mark.parametrize(
    ("word", "option"),
    [
        ("--bindto", "--bind-to"),
        ("--hostfle", "--hostfile"),
        ("--npernde", "--npernode"),
        ("-npernde", "--npernode"),
        ("--fusion-treshold=3", "--fusion-threshold"),
    ],
)
def test_an_unknown_option_gets_the_nearest_one(word: str, option: str) -> None:
    result = CliRunner().invoke(cli.ringrun, ["-np", "2", word, "core", "x.py"])
    assert result.exit_code == 2 and f"Did you mean '{option}" in result.output


@pytest.mark.parametrize("word", ["--yyxxyy", "-zz"])
def test_an_unknown_option_that_is_like_none_gets_no_suggestion(word: str) -> None:
    result = CliRunner().invoke(cli.ringrun, ["-np", "2", word, "x.py"])
    assert result.exit_code == 2 and "Did you mean" not in result.output
    assert f"No such option '{word}'. 'ringrun --help-all' lists all." in result.output


def test_an_option_of_mpirun_without_its_values() -> None:
    result = CliRunner().invoke(cli.ringrun, ["-np", "2", "--mca", "btl"])
    assert result.exit_code == 2 and "--mca takes 2 values" in result.output
