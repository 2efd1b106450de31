"""Lines of other launchers: each works, or the answer says what to write."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any, Dict, List, Tuple

import click
import pytest
from click.testing import CliRunner

from ringrun import cli
from ringrun.plan.launchers import names, rule_of, translate
from ringrun.plan.options import Options

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
        ("-N 2 x.py", "--slots-per-host 2 x.py"), ("--map-by ppr:4:node x.py", "--slots-per-host 4 x.py"),
        ("--nproc_per_node=4 --nnodes=2 --tee 3 train.py", "--slots-per-host 4 train.py"),
        # MPICH.
        ("-hosts a,b -ppn 2 -genv OMP_NUM_THREADS 1 -genvlist A,B x.py",
         "-H a,b --slots-per-host 2 -x OMP_NUM_THREADS=1 -x A -x B x.py"),
        ("-genvall x.py", "x.py"), ("-genvnone -genvlist A x.py", "--no-env -x A x.py"),
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
        ("-np 2 -- -n", "-np 2 -- -n"), ("-np 2 -m pkg -n 3", "-np 2 -m pkg -n 3"),
        ("--iface jetson1=eth0 --mca btl_tcp_if_include eth1 x.py", "--iface eth1 --iface jetson1=eth0 x.py"),
        ("", ""), ("-np", "-np"), ("--mca key", "--mca key"), ("-np 2 --iface", "-np 2 --iface"),
        ("--fusion-threshold-mb 3 --cycle-time-ms 3.5 x.py", "--fusion-threshold 3M x.py"),
        ("--fusion-threshold-mb=0 --gloo x.py", "--fusion-threshold 0 x.py"),
        ("--stall-check-shutdown-time-seconds 3 --no-stall-check x.py", "--late-after 3 --late-after 0 x.py"),
        ("--timeline-filename t --timeline-mark-cycles x.py", "--timeline t x.py"),
        ("--timeline-filename DYNAMIC --blacklist-cooldown-range 1 2 x.py", "x.py"),
        ("--iface=en0 --mca btl_tcp_if_include eth1,en0 x.py", "--iface en0,eth1 x.py"),
        ("-mca btl_tcp_if_exclude lo x.py", "x.py"), ("--mca plm_rsh_agent rsh x.py", "--ssh rsh x.py"),
        ("--mca rmaps_base_oversubscribe 1 x.py", "--oversubscribe x.py"),
        ("--mca hwloc_base_binding_policy numa x.py", "--bind core x.py"),
        ("--bind-to package:report x.py", "--bind core x.py"), ("--bind-to l3cache x.py", "--bind core x.py"),
        ("--map-by core:PE=2 x.py", "x.py"),
    ],
)  # fmt: skip
def test_lines(line: str, expected: str) -> None:
    assert words(line) == expected.split() if "ssh -p" not in expected else "ssh -p12345" in words(line)


@pytest.mark.parametrize(
    ("line", "note"),
    [
        ("-map-by node x.py", "slot after slot"), ("--bind-to hwthread x.py", "bound to cores"),
        ("--report-bindings x.py", "--dry-run"), ("-timestamp-output x.py", "without a time"),
        ("--mca opal_cuda_support 1 x.py", "does not use MPI"),
        ("--bind-to boards x.py", "--bind-to boards is not done: ranks are not bound"),
        ("--nproc-per-node gpu x.py", "give a number"), ("--backend jaccl x.py", "connected by ringcomm"),
        ("--rdzv-endpoint=host:1 x.py", "run it once"),
        ("--autotune x.py", "--autotune has no effect: ringcomm does not tune itself"),
        ("--mca btl_tcp_if_include eth0 x.py", ""), ("--allow-run-as-root x.py", ""),
    ],
)
def test_notes_say_what_happens_instead(line: str, note: str) -> None:
    notes = translate(line.split(), OWN.get).notes
    assert len(notes) == bool(note)
    assert all(note in text for text in notes)


def test_every_option_gives_options_that_ringrun_has() -> None:
    """No rule leads to an option that is itself refused."""
    for name in names():
        line = translate([name, "3", "3", "x.py"], {"-np": 1}.get).words
        result = CliRunner().invoke(cli.ringrun, ["--dry-run", *line])
        assert "No such option" not in result.output, (name, result.output)


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


@pytest.mark.parametrize(
    ("word", "option"),
    [
        ("--bindto", "--bind-to"), ("--hostfle", "--hostfile"), ("--npernde", "--npernode"),
        ("-npernde", "--npernode"), ("--fusion-treshold=3", "--fusion-threshold"),
    ],
)
def test_an_unknown_option_gets_the_nearest_one(word: str, option: str) -> None:
    result = CliRunner().invoke(cli.ringrun, ["-np", "2", word, "core", "x.py"])
    assert result.exit_code == 2 and f"Did you mean '{option}" in result.output


PYTHON = ("python", "train.py")
SCRIPT = ("train.py", "--epochs", "3")
LINES: List[Tuple[str, Dict[str, Any], Tuple[str, ...]]] = [
    ("torchrun --standalone --nproc-per-node=4 train.py --epochs 3", {"slots_per_host": 4}, SCRIPT),
    ("torchrun --nnodes=2 --nproc_per_node=1 --node_rank=0 --master_addr=10.0.0.1 --master_port=29500 "
     "--max-restarts 2 train.py --epochs 3", {"slots_per_host": 1, "restarts": 2}, SCRIPT),
    ("python3 -m torch.distributed.launch --use-env --nproc_per_node=2 train.py --epochs 3",
     {"slots_per_host": 2}, SCRIPT),
    ("mpirun -np 4 -H server1:2,server2:2 -bind-to none -map-by slot -x NCCL_DEBUG=INFO -mca pml ob1 "
     "-mca btl ^openib python train.py",
     {"np": 4, "hosts": "server1:2,server2:2", "forward": ("NCCL_DEBUG=INFO",)}, PYTHON),
    ("mpiexec -n 4 -hosts a,b -ppn 2 -genv OMP_NUM_THREADS 1 python train.py",
     {"np": 4, "hosts": "a,b", "slots_per_host": 2, "forward": ("OMP_NUM_THREADS=1",)}, PYTHON),
    ("horovodrun -np 4 -H localhost:4 python train.py", {"np": 4, "hosts": "localhost:4"}, PYTHON),
    ("horovodrun -np 2 --min-np 1 --max-np 4 --host-discovery-script ./hosts.sh python train.py",
     {"np": 2, "min_np": 1, "max_np": 4, "host_discovery_script": "./hosts.sh"}, PYTHON),
    ("mlx.launch --hosts 10.0.0.1,10.0.0.2 --backend ring -n 2 train.py --epochs 3",
     {"hosts": "10.0.0.1,10.0.0.2", "slots_per_host": 2}, SCRIPT),
    ("accelerate launch --multi_gpu --num_processes 2 --num-machines=1 --mixed_precision bf16 "
     "train.py --epochs 3", {"np": 2, "forward": ("ACCELERATE_MIXED_PRECISION=bf16",)}, SCRIPT),
]  # fmt: skip
INSTEAD = [
    ("srun --nodes=2 --ntasks-per-node=4 --gres=gpu:4 python train.py", "salloc) ringrun takes its nodes"),
    ("docker run --gpus all --rm image python train.py", "--via 'docker exec -i {host}' -H box1,box2"),
]
"""The eleven lines are those of both lists."""


def run(words: List[str], monkeypatch: pytest.MonkeyPatch) -> Tuple[List[Any], str, int]:
    seen: List[Any] = []
    monkeypatch.setattr(cli, "_run", lambda options, command, dry_run: seen.append((options, command)))
    result = CliRunner().invoke(cli.ringrun, words)
    return seen, result.output, result.exit_code


@pytest.mark.parametrize(("line", "options", "command"), LINES, ids=lambda item: str(item)[:24])
def test_it_works_behind_ringrun_and_with_the_names_exchanged(
    line: str, options: Dict[str, Any], command: Tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = shlex.split(line)
    seen, output, code = run(words, monkeypatch)
    assert (seen, code) == ([(Options(**options), command)], 0), output
    assert "is left out: ringrun starts the ranks itself" in output
    own = ["--verbose", *words]
    assert run(own, monkeypatch)[0] == [(Options(**options, verbose=True), command)]
    if words[0] in ("torchrun", "mpirun", "mpiexec", "horovodrun", "accelerate"):
        seen, output, code = run(words[2 if words[0] == "accelerate" else 1 :], monkeypatch)
        assert (seen, code) == ([(Options(**options), command)], 0), output
        assert "is left out" not in output


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("torchrun --nnodes=2 --nproc-per-node=2 train.py", "--nnodes 2"),
        ("--nnodes=2:4 train.py", "--nnodes 2"),
        ("accelerate launch --num_machines 2 train.py", "--num_machines 2"),
        ("--nodes 3 -H localhost,a train.py", "--nodes 3"),
        ("torchrun --nnodes 2 -H localhost,a train.py", ""), ("torchrun --nnodes 1:2 train.py", ""),
        ("--num-machines $N train.py", ""),
    ],
)
def test_more_hosts_than_the_job_has_are_refused(line: str, option: str) -> None:
    result = CliRunner().invoke(cli.ringrun, ["--dry-run", *line.split()])
    assert result.exit_code == (2 if option else 0), result.output
    assert not option or f"{option} requests {option[-1]} hosts, but this job has" in result.output
    assert not option or "name them, as in -H localhost,host2" in result.output


@pytest.mark.parametrize(("line", "text"), INSTEAD)
def test_or_it_says_what_to_write(line: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, output, code = run(shlex.split(line), monkeypatch)
    assert (seen, code) == ([], 2) and text in output, output


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("/usr/bin/docker ps", ("/usr/bin/docker", "ps")), ("./torchrun x", ("./torchrun", "x")),
        ("-m torch.distributed.run train.py", ("train.py",)),
        ("-- python -m torch.utils.collect_env", ("python", "-m", "torch.utils.collect_env")),
        ("accelerate env", ("accelerate", "env")),
        ("accelerate launch --cpu --config_file f.yaml --num_processes 2 x.py", ("x.py",)),
        ("accelerate launch --module pkg.train -x", ("-m", "pkg.train", "-x")),
        ("mlx.launch --env A=1 --env=B=2 x.py", ("x.py",)),
        ("python train.py torchrun", ("python", "train.py", "torchrun")),
    ],
)
def test_other_lines(line: str, command: Tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    seen, output, code = run(shlex.split(line), monkeypatch)
    assert code == 0 and seen[0][1] == command, output
    if "--env" in line:
        assert seen[0][0].forward == ("A=1", "B=2")
    if "--cpu" in line:
        assert "ringrun starts the ranks itself; --config_file: nothing that" in output


@pytest.mark.parametrize(
    "line", ["accelerate launch --use_fsdp x.py", "mlx.launch --nope x.py", "torchrun --nope x"]
)
def test_an_option_without_a_counterpart_is_refused(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, output, code = run(line.split(), monkeypatch)
    assert (seen, code) == ([], 2) and "No such option" in output
