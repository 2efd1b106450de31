"""What users of other launchers paste first: each line works, or the answer says what to write."""

from __future__ import annotations

import shlex
from typing import Any, Dict, List, Tuple

import pytest
from click.testing import CliRunner

from ringrun import cli
from ringrun.plan.options import Options

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
        ("torchrun --nnodes 2 -H localhost,a train.py", ""),
        ("torchrun --nnodes 1:2 train.py", ""),
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
        ("/usr/bin/docker ps", ("/usr/bin/docker", "ps")),
        ("./torchrun x", ("./torchrun", "x")),
        ("-m torch.distributed.run train.py", ("train.py",)),
        ("-- python -m torch.utils.collect_env", ("python", "-m", "torch.utils.collect_env")),
        ("accelerate env", ("accelerate", "env")),
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


@pytest.mark.parametrize(
    "line", ["accelerate launch --use_fsdp x.py", "mlx.launch --nope x.py", "torchrun --nope x"]
)
def test_an_option_without_a_counterpart_is_refused(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, output, code = run(line.split(), monkeypatch)
    assert (seen, code) == ([], 2) and "No such option" in output


def test_what_has_no_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "accelerate launch --cpu --config_file f.yaml --num_processes 2 x.py"
    seen, output, _ = run(line.split(), monkeypatch)
    assert seen == [(Options(np=2), ("x.py",))]
    assert "accelerate is left out: ringrun starts the ranks itself; --config_file: nothing that" in output
