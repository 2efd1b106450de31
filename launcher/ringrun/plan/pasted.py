"""Command lines of other launchers: ``ringrun torchrun --nproc-per-node=2 train.py``. Pure.

Started as the ranks' program, such a launcher would start all ranks once for each rank. So its name is
removed and its options become ringrun's (:mod:`.mpirun` has most), or an error says what to write instead. A
launcher that is named with a path (``/usr/bin/docker``) is a program like any other.
"""

from __future__ import annotations

import re
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from ringcomm.errors import ConfigError

from .mpirun import Translated, values_of

_TORCH = ("torch.distributed.run", "torch.distributed.launch")
_ITSELF = "ringrun starts the ranks itself"
_LEFT_OUT = (
    "torchrun", "mpirun", "mpiexec", "mpiexec.hydra", "mpirun.openmpi", "mpirun.mpich", "mpiexec.openmpi",
    "mpiexec.mpich", "orterun", "prterun", "horovodrun",
)  # fmt: skip
"""Launchers whose options are all in :mod:`.mpirun` and :mod:`.horovod`."""
_RENAMED: Dict[str, Dict[str, Tuple[int, str]]] = {
    "mlx.launch": {"-n": (1, "--slots-per-host"), "-p": (1, ""), "--env": (1, "-x")},
    "accelerate": {"--config-file": (1, ""), "--cpu": (0, ""), "--debug": (0, ""), "--module": (0, "-m")},
}  # fmt: skip
"""Options that ringrun has under another name, or does not have, or uses with another meaning."""
_INSTEAD: Mapping[str, str] = {
    "srun": "inside a job of Slurm (sbatch, salloc) ringrun takes its nodes and tasks: write `ringrun "
    "train.py` there, without srun. Partition, time and resources are options of sbatch or salloc",
    **dict.fromkeys(
        ("docker", "podman"),
        "ringrun starts ranks in containers that run already, one per host: {name} run -d --name box1 IMAGE "
        "sleep infinity, then `ringrun --via '{name} exec -i {{host}}' -H box1,box2 train.py`",
    ),
    "deepspeed": "ringrun does not have DeepSpeed's engine. For a script of torch.distributed, write "
    '`ringrun -np 2 train.py`, and init_process_group("ringcomm") in it',
}  # fmt: skip


def without_launcher(words: Sequence[str]) -> Optional[Translated]:
    """Return the command line of another launcher without its name, with lines for the user; None if the
    command is not a launcher. ConfigError says what to write if ringrun cannot replace it.
    """
    name = words[0] if words else ""
    if name in _INSTEAD:
        raise ConfigError(f"{name}: {_INSTEAD[name].format(name=name)}.")
    if name in _LEFT_OUT:
        return Translated(list(words[1:]), [f"{name} is left out: {_ITSELF}"])
    if name == "mlx.launch":
        return _renamed(name, words[1:])
    if name == "accelerate" and words[1:2] == ["launch"]:
        return _renamed(name, words[2:])
    start = 1 if re.fullmatch(r"(.*/)?python(3(\.\d+)?)?", name) else 0
    if words[start : start + 1] == ["-m"] and words[start + 1 : start + 2] and words[start + 1] in _TORCH:
        return Translated(list(words[start + 2 :]), [f"{words[start + 1]} is left out: {_ITSELF}"])
    return None


def _renamed(name: str, words: Sequence[str]) -> Translated:
    """Return the words after a launcher that has its own options."""
    rules = _RENAMED[name]
    found: List[str] = []
    unused: List[str] = []
    position = 0
    while position < len(words) and words[position].startswith("-"):
        option, equals, value = words[position].partition("=")
        count, own = rules.get(option.replace("_", "-"), (values_of(option), option))
        values = [value] if equals else list(words[position + 1 : position + 1 + count])
        position += 1 + (0 if equals else count)
        if own == "-m":
            return Translated([*found, "-m", *words[position:]], _notes(name, unused))
        if own:
            found += [own, *values]
        elif count:
            unused.append(option)
    return Translated([*found, *words[position:]], _notes(name, unused))


def _notes(name: str, unused: Sequence[str]) -> List[str]:
    more = f"; {', '.join(unused)}: nothing that ringrun needs" if unused else ""
    return [f"{name} is left out: {_ITSELF}{more}"]
