"""The user's report at the end of a failed job, from facts; remedies look at files of this machine."""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import shlex
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import ringcomm

from ..agent.agent import CHECK_LIMIT_S
from ..agent.checks import PROVISIONED
from ..plan.job import HostJob, Job
from ..reach.base import NOTHING, other_python, quoted
from .first_failure import Cause, Exit, FirstFailure, ranks_text, signal_name
from .waiting import is_users

Diagnosis = Callable[[bool], str]
"""Tells which ranks waited for which, after a text that perhaps names calls that differ."""
NO_DIAGNOSIS: Diagnosis = lambda names_calls: ""  # noqa: E731
MAX_LINES = 40
"""Above this the report leaves out the middle of the frames, and of the error."""
ERRORS = "ringcomm.errors."
"""The beginning of a traceback's last line if ringcomm raised the error."""

_HEAD = "Traceback (most recent call last):"
_GROUP = "  + Exception Group Traceback (most recent call last):"
_IGNORED = "Exception ignored "
_CAUSED = "The above exception was the direct cause"
_FRAME = re.compile(r'  File "(?:.*[/\\])?ringcomm[/\\]([^"]+)", line \d+, in ')
_FILE = re.compile(r'  File "([^"]+)", line \d+')
_PACKAGE = Path(ringcomm.__file__).parent
_MISMATCH = f"{ERRORS}MismatchError:"
_DISAGREE = "the ranks do not make the same calls"
_NO_MODULE = re.compile(r"ModuleNotFoundError: No module named '(\w+)'$")


def box(title: str, paragraphs: Sequence[str], last: str = "") -> str:
    """Return a box that is open to the right, so that long lines may wrap."""
    lines = [f"╭─ ringrun: {title}"]
    for index, paragraph in enumerate(paragraphs):
        if index:
            lines.append("│")
        lines += [f"│ {line}".rstrip() for line in paragraph.splitlines()]
    lines.append(f"╰─ {last}" if last else "╰─")
    return "\n".join(lines) + "\n"


def failure_box(
    failure: FirstFailure, hosts: Mapping[int, str], host_names: Sequence[str],
    tails: Mapping[int, Sequence[str]], diagnosis: Diagnosis = NO_DIAGNOSIS,
    pythons: Optional[Mapping[str, str]] = None, first: Sequence[str] = (),
) -> str:  # fmt: skip
    """Return the report: the rank that failed first, where, how, its last traceback; the others in one line.
    `hosts` and `tails` are by rank, `host_names` in the plan's order, `pythons` by host name.
    """
    cause = failure.cause()
    assert cause is not None
    alike = _alike(failure, cause, tails)
    disagree = bool(alike) and shared_error(tails.get(alike[0], ())).startswith(_MISMATCH)
    title = _DISAGREE if disagree else _title(failure, cause, hosts, host_names)
    paragraphs = [*first, *_body(cause, tails)]
    if cause.rank is not None:
        host = hosts[cause.rank]
        paragraphs.append(missing_module_hint(tails.get(cause.rank, ()), host, (pythons or {}).get(host, "")))
    paragraphs += [_others(failure, cause, alike), diagnosis(disagree)]
    return box(title, list(filter(None, paragraphs)), f"exit code {failure.exit_code()}")


def _title(failure: FirstFailure, cause: Cause, hosts: Mapping[int, str], host_names: Sequence[str]) -> str:
    if cause.host_index is not None:
        return f"the host {host_names[cause.host_index]} was lost first"
    if cause.rank is None:
        return "the job failed"
    if cause.exit is not None and cause.exit.ok:
        waiting = sorted(failure.secondary() - {cause.rank}) or sorted(set(hosts) - {cause.rank})
        verb = "waits" if len(waiting) == 1 else "wait"
        return f"rank {cause.rank} has ended while {ranks_text(waiting)} still {verb} for it"
    verb = "held up the others" if cause.how.startswith("still running") else "failed first"
    return f"rank {cause.rank} on {hosts[cause.rank]} {verb}: {cause.how}"


def _body(cause: Cause, tails: Mapping[int, Sequence[str]]) -> List[str]:
    if cause.rank is None:
        return [cause.how]
    paragraphs = [signal_hint(cause.exit)]
    tail = tails.get(cause.rank, ())
    error = error_paragraphs(tail)
    if error:
        paragraphs += error
    elif [line for line in tail if line.strip()] and not (cause.exit is not None and cause.exit.ok):
        paragraphs.append("Its last words on stderr:\n" + "\n".join(list(tail)[-5:]))
    if cause.detail and not error:
        paragraphs.append(cause.detail)
    return paragraphs


def error_paragraphs(tail: Sequence[str]) -> List[str]:
    """Return the last traceback on a rank's stderr, its cause and a remedy; [] without a traceback."""
    lines = traceback_lines(tail)
    if not lines:
        return []
    raised_from = direct_cause(tail)
    because = f"That was raised because of {raised_from}" if raised_from else ""
    shown = last_traceback(without_inner_frames(lines))
    return list(filter(None, (shown, because, hint_of("\n".join(lines)))))


def signal_hint(end: Optional[Exit]) -> str:
    """Return the usual meaning of a signal that is not obvious."""
    # ringrun's own signal needs no explanation.
    name = "" if end is None or end.signal == end.sent else signal_name(end.signal)
    crash = f"{name} is a crash in compiled code. PYTHONFAULTHANDLER=1 (-x PYTHONFAULTHANDLER=1) shows where."
    killed = (
        "It was killed with SIGKILL. The kernel does that when memory runs out: see `dmesg | grep -i oom` on "
        "that host."
    )
    crashes = dict.fromkeys(("SIGSEGV", "SIGBUS", "SIGILL", "SIGABRT", "SIGFPE"), crash)
    return {"SIGKILL": killed, **crashes}.get(name, "")


def missing_module_hint(lines: Sequence[str], host: str, python: str) -> str:
    """Return which interpreter lacks a module, if the last traceback ends because of that; or ""."""
    name = _missing_module(lines)
    if not name or not python:
        return ""
    if name == "horovod":
        return (
            "ringrun starts scripts for Horovod unchanged with --horovod (`ringrun --horovod train.py`). Or "
            "import ringcomm.torch (tensorflow, keras, mxnet) in place of horovod.torch."
        )
    return (
        f"On {host} ranks run {python}, which finds no module `{name}`. Install the package there "
        f"(`{python} -m pip install …`), or copy the file there if it is your own. {other_python(host)}"
    )


def _missing_module(lines: Sequence[str]) -> str:
    found = [match for line in traceback_lines(lines) if (match := _NO_MODULE.match(line))]
    return found[-1][1] if found else ""


def search_path_hint(host: HostJob, lines: Sequence[str]) -> str:
    """Return a paragraph if a rank on another host lacks a module and PYTHONPATH of this shell; or ""."""
    folders = os.environ.get("PYTHONPATH", "")
    if host.is_local or "PYTHONPATH" in host.env or not folders or not _missing_module(lines):
        return ""
    return (
        f"This shell's PYTHONPATH is {folders}, which ranks on other hosts do not get: if the module is in a "
        "folder of it, -x PYTHONPATH passes it to the ranks, and the folder must be there."
    )


def _alike(failure: FirstFailure, cause: Cause, tails: Mapping[int, Sequence[str]]) -> List[int]:
    """Return the other ranks that failed with the box's error: an error of ringcomm, or the same bug."""
    own = () if cause.rank is None else tails.get(cause.rank, ())
    error, bug = shared_error(own), origin(own)
    found = []
    for rank, end in failure.exits.items():
        tail = tails.get(rank, ())
        same = (error and shared_error(tail) == error) or (bug[0] and origin(tail) == bug)
        if same and not end.ok and rank != cause.rank and rank not in failure.past:
            found.append(rank)
    return sorted(found)


def _others(failure: FirstFailure, cause: Cause, alike: Sequence[int]) -> str:
    """Return a line for the ranks that stopped because of the cause, and lines for the others."""
    exits, victims = failure.exits, failure.secondary() - {cause.rank}
    failed = {rank for rank, end in exits.items() if rank != cause.rank and not end.ok} - failure.past
    alone = {rank for rank in failed - victims if not exits[rank].sent}
    if cause.host_index is not None:
        # The rendezvous may not have had the time to report it.
        victims, alone = victims & set(exits), set()
    ended = failed | victims
    lines = [f"{ranks_text(alike).capitalize()} failed with the same error."] if alike else []
    ended, alone = ended - set(alike), alone - set(alike)
    if ended - alone:
        lines.append(f"{ranks_text(sorted(ended - alone)).capitalize()} stopped because of it.")
    for how in sorted({exits[rank].describe() for rank in alone}):
        ranks = [rank for rank in alone if exits[rank].describe() == how]
        lines.append(f"{ranks_text(ranks).capitalize()} failed too: {how}.")
    return "\n".join(lines)


_PROBLEMS = {
    "cwd": "there is no directory {path}{here}. Ranks start in the directory that ringrun was started in. "
    "Make it, send it along with --ship, or name another one with --cwd {host}=PATH, or with cwd=PATH in "
    "the hostfile.",
    "interpreter": "there is no Python at {path}{here}. {other_python}",
    "script": "there is no script {path}{here}. Copy it there (rsync -a, or a shared directory), send it "
    "along with --ship, or name the directory that it is in with --cwd {host}=PATH.",
    "cwd joined": "there is no directory {path} over there. Make it, or leave out --cwd: ranks then start in "
    "the directory in which ringrun join was started.",
    "script joined": "there is no script {path} over there. Send it along with --ship, or start ringrun join "
    "in the directory that it is in.",
    "script here": "there is no script {path}. Check its name, and the directory that you are in.",
    "program": "there is no program {path} in PATH{here}, or it may not be run. Install it, or give its "
    "full path. If it is a host: hosts are separated by commas (-H localhost,host1).",
    "program path": "{path} is no program{here}: no such file, a directory, or one without chmod +x.",
    "shadow": "{path} is next to what the ranks run, so `import horovod` would find that and not ringcomm. "
    "Move or rename it, or leave out --horovod.",
    "write": "--timeline: {path} cannot be written: {why}. Name another file.",
    "package": "what was sent to it could not be unpacked: {why}. Make room in one of these directories.",
    "start": "{path} could not be started: {why}.",
    "start too long": "{path} could not be started: {why}. --no-env passes none of this shell's variables, "
    "-x NAME one.",
    "old": "{path} is Python {version}, and ringcomm needs 3.8 or newer. {other_python}",
    "missing": "{python} cannot import {missing} ({found_why}). Install it there: `{python} -m pip install "
    "{missing}`. {other_python}",
    "missing provisioned": "{python} cannot import {missing} ({found_why}). Install it there: `{python} -m "
    "pip install {missing}`, or let ringrun send it (--provision). {other_python}",
    "missing own": "{python} cannot import {missing} ({found_why}). {install} {other_python}",
    "bytecode": "{python} is Python {version}, but the function comes from Python {wanted} here. Functions "
    "travel as bytecode, which only the same minor version can run. Use the same one on all hosts, or put "
    "the function into a script and start that with ringrun. {other_python}",
    "version": "ringcomm {ringcomm} is installed there ({ringcomm_at}), but here it is {wanted}; all ranks "
    "need the same. {install} {other_python}",
    "check": "{path} could not import numpy and ringcomm in a trial run ({how}). It said: {said}. Try by "
    "hand: {path} -c 'import numpy, ringcomm' {other_python}",
}
"""Problems of hosts by kind (:mod:`ringrun.agent.checks`), with remedies."""


def host_problem(host: str, facts: Dict[str, Any], is_local: bool, is_named: bool = True) -> str:
    """Return an agent's ``problem`` event as a paragraph with a remedy. ``is_named``: options can name the
    host; otherwise it has joined with a code.
    """
    kind, found = facts["problem"], facts.get("found", {})
    python, missing = found.get("python") or facts["path"], found.get("missing")
    variants = {
        "script here": is_local, "script joined": not is_named, "cwd joined": not is_named,
        "program path": "/" in facts["path"],
        "start too long": f"[Errno {errno.E2BIG}]" in facts.get("why", ""),
        "missing provisioned": missing in PROVISIONED,
        "missing own": missing in ("ringcomm", "ringrun"),
    }
    chosen = next((name for name, holds in variants.items() if holds and name.split()[0] == kind), kind)
    values = {"ringcomm_at": None, **found, **facts, "found_why": found.get("why")}
    if kind == "check":
        values.update(_trial_run(facts))
    values.update(
        host=host, here="" if is_local else " over there", python=python,
        other_python=other_python(host) if is_named else "Start ringrun join there with another Python.",
        # No package index has it.
        install="Install this machine's version there, from its folder or wheel: "
        f"`{python} -m pip install PATH`.",
    )  # fmt: skip
    return f"{host}: {_PROBLEMS[chosen].format_map(values)}"


def _trial_run(facts: Mapping[str, Any]) -> Dict[str, str]:
    """Return how a trial run ended, and what it said."""
    how = (
        f"no answer within {CHECK_LIMIT_S:g} s" if facts["sent"]
        else f"exit code {facts['code']}" if facts["signal"] is None
        else f"ended by {signal_name(facts['signal'])}"
    )  # fmt: skip
    said = "; ".join(line.strip() for line in facts["text"].splitlines()[-3:] if line.strip())
    return {"how": how, "said": quoted(said) if said else NOTHING}


# -- tracebacks on the stderr of ranks ---------------------------------------------------------


def _starts(lines: Sequence[str]) -> List[int]:
    """Return the indices at which tracebacks begin, without those of errors that Python has ignored."""
    return [
        index for index, line in enumerate(lines)
        if line.startswith((_HEAD, _GROUP)) and not (index and lines[index - 1].startswith(_IGNORED))
    ]  # fmt: skip


def traceback_lines(lines: Sequence[str]) -> List[str]:
    """Return the last traceback, or none; the lines after it are the error's, in which some may be empty."""
    starts = _starts(lines)
    if not starts:
        return []
    first = starts[-1]
    ignored = (index for index in range(first, len(lines)) if lines[index].startswith(_IGNORED))
    return list(lines[first : next(ignored, len(lines))])


def _parts(lines: Sequence[str]) -> Tuple[List[str], List[str]]:
    """Return the frames of a traceback, with its first line, and the error, without final empty lines."""
    texts = (index for index, line in enumerate(lines) if index and not line.startswith((" ", "\t")))
    split = next(texts, len(lines))
    last = max((index for index, line in enumerate(lines) if line.strip()), default=-1)
    return list(lines[:split]), list(lines[split : last + 1])


def _shortened(lines: Sequence[str], most: int = MAX_LINES) -> List[str]:
    """Return the lines, without the middle if there are more than `most`."""
    half = most // 2
    more = f"  … {len(lines) - 2 * half} lines left out …"
    return list(lines) if len(lines) <= most else [*lines[:half], more, *lines[-half:]]


def direct_cause(lines: Sequence[str]) -> str:
    """Return the first error in the chain that led to the last traceback's, with its place; or ""."""
    starts = _starts(lines)
    chosen = len(starts) - 1
    while chosen > 0 and any(line.startswith(_CAUSED) for line in lines[starts[chosen - 1] : starts[chosen]]):
        chosen -= 1
    if chosen in (-1, len(starts) - 1):
        return ""
    part = lines[starts[chosen] : starts[chosen + 1]]
    frames, error = _parts([line for line in part if not line.startswith(_CAUSED)])
    files = [line for line in frames if line.startswith("  File ")]
    own = [line for line in files if (found := _FILE.match(line)) and is_users(found[1])]
    place = (own or files or [""])[-1].strip()  # of the program, or else the innermost
    return "\n  ".join(filter(None, [*_shortened(error, MAX_LINES // 2), place])) if error else ""


def last_traceback(lines: Sequence[str]) -> str:
    """Return the last traceback in these lines, shortened, or ""."""
    frames, error = _parts(traceback_lines(lines))
    return "\n".join([*_shortened(frames), *_shortened(error)]).rstrip()


def last_error(lines: Sequence[str]) -> str:
    """Return the first line of the last traceback's error; without one the last line; or ""."""
    errors = (line for line in traceback_lines(lines)[1:] if not line.startswith((" ", "\t")))
    return next(errors, "") or next((line.strip() for line in reversed(lines) if line.strip()), "")


def is_shown_whole(lines: Sequence[str]) -> bool:
    """Return whether :func:`last_traceback` is complete."""
    return all(len(part) <= MAX_LINES for part in _parts(traceback_lines(lines)))


def without_inner_frames(lines: Sequence[str]) -> List[str]:
    """Return a traceback without the frames inside ringcomm if it ends in one of ringcomm's errors, which are
    about the program that called it; another error may be a defect of ringcomm, for which all frames count.
    """
    if not shared_error(lines):
        return list(lines)
    left: List[str] = []
    inner = False
    for line in lines:
        if line.startswith("  File "):
            found = _FRAME.match(line)
            # The path of a user's own folder may contain the word, too.
            inner = found is not None and (_PACKAGE / found[1].replace("\\", "/")).is_file()
        elif not line.startswith((" ", "\t")):
            inner = False
        if not inner:
            left.append(line)
    return left if any(line.startswith("  File ") for line in left) else list(lines)


def shared_error(lines: Sequence[str]) -> str:
    """Return the first line of ringcomm's error in which the last traceback ends, or ""."""
    return next((line for line in traceback_lines(lines) if line.startswith(ERRORS)), "")


def origin(lines: Sequence[str]) -> Tuple[str, str]:
    """Return the last traceback's innermost frame and class; two "" for ringcomm's errors, of other ranks."""
    frames, error = _parts(traceback_lines(lines))
    files = [line for line in frames if line.startswith("  File ")]
    if not files or any(line.startswith(ERRORS) for line in lines):
        return "", ""
    return files[-1], error[0].partition(":")[0] if error else ""


# -- remedies for errors that do not name their cause ------------------------------------------

_REMEDIES = (
    (r"keras\.optimizers\.legacy` is not supported in Keras 3"
     r"|'(?:Keras)?Variable' object has no attribute 'ref'"
     r"|Argument\(s\) not recognized: \{'(?:lr|decay)'"
     r"|Unrecognized keyword arguments passed to BatchNormalization: \{'fused'"
     r"|module '[\w.]*keras[\w.]*' has no attribute '[gs]et_session'"
     r"|cannot import name '[gs]et_session' from '[\w.]*keras"
     r"|\.variables\(\)[^\0]*TypeError: 'list' object is not callable"
     r"|compile\(\) got an unexpected keyword argument 'experimental_run_tf_function'",
     "This program was written for Keras 2, and tf.keras is Keras 3 here. Install tf_keras of TensorFlow's "
     "version on every host, and add -x TF_USE_LEGACY_KERAS=1 to the command."),
    (r"module 'tensorflow' has no attribute '(?:ConfigProto|GPUOptions|Session|InteractiveSession|"
     r"placeholder|global_variables_initializer|get_variable|variable_scope|get_default_graph|"
     r"reset_default_graph|set_random_seed|app|flags|logging|layers|contrib)'",
     "This program was written for TensorFlow 1. Write `import tensorflow.compat.v1 as tf` and "
     "`tf.disable_v2_behavior()` in place of `import tensorflow as tf`; tf.contrib has no successor."),
    (r"cannot import name 'HorovodStrategy'|strategies\.horovod'|invalid strategy name: .*horovod",
     "Lightning 2 has no HorovodStrategy. Write `import ringcomm.lightning` and "
     '`Trainer(strategy="ddp_ringcomm", accelerator="cpu")`.'),
    (r"[Uu]nknown c10d backend type '?RINGCOMM",
     "Write `import ringcomm.torch.distributed` before init_process_group(): PyTorch finds the backend "
     "without it only from 2.5 on, and not with TORCH_DEVICE_BACKEND_AUTOLOAD=0."),
    (r"marked as ready twice|mark a variable ready only once|computed more than backward_passes_per_step",
     "If the model uses gradient checkpointing, pass use_reentrant=False to torch.utils.checkpoint "
     '(gradient_checkpointing_kwargs={"use_reentrant": False} in Transformers): the other form computes '
     "the gradients of a layer that is used twice in passes of their own."),
)


def hint_of(traceback: str) -> str:
    """Return a remedy for the error of a traceback, as a paragraph for the failure report, or ""."""
    return next((text for pattern, text in _REMEDIES if re.search(pattern, traceback)), "")


# -- files of this machine --------------------------------------------------------------------

_MISSING = re.compile(
    r"no such file|not ?found|does ?n[o']t exist|errno = 2\b|(can|could) ?n[o']t (find|open)|unable to open",
    re.I,
)
_NAME = re.compile(r"'([^'\n]+)'|\"([^\"\n]+)\"|([^\s'\"`:;,()\[\]]*[/.][^\s'\"`:;,()\[\]]+)")
"""What may be a path in an error."""


def local_file_hint(job: Job, host: HostJob, lines: Sequence[str]) -> str:
    """Return a paragraph if a rank failed because its host lacks a file of this machine, or ""."""
    last = traceback_lines(lines)[1:] or lines[-5:]
    error = "\n".join(line for line in last if not line.startswith("  "))
    if host.is_local or not _MISSING.search(error):
        return ""
    names = (next(filter(None, groups)).rstrip(".") for groups in _NAME.findall(error))
    tree, sent = job.tree if host.gets_code else None, set()
    if tree is not None:
        copy = f"/{job.folder}-{host.index}/"  # the tree's on the host
        names = (str(tree.root / name.partition(copy)[2]) if copy in name else name for name in names)
        sent = {str(tree.root / file.path) for file in tree.files}
    found = [os.path.abspath(name) for name in names if os.path.exists(name)]  # noqa: PTH100, PTH110
    path = next((path for path in found if path not in sent), "")
    if not path:
        return ""
    target = f"{host.planned.spec.target}:{os.path.dirname(path)}/"  # noqa: PTH120
    command = f"rsync -a {shlex.quote(path)} {shlex.quote(target)}"
    remedy = f"Copy it there (`{command}`), send the directory of the program along with --ship"
    if tree is not None:
        remedy = (
            f"--ship does not send it: {tree.why_not_sent(Path(path))}. Copy it there, to the same path "
            f"(`{command}`), and have the program use the absolute path"
        )
    return (
        f"{path} is on this machine, but not on {host.name}: each rank reads the files of its own host. "
        f"{remedy}, or use a directory that all hosts share. What rank 0 has written in this job, rank 0 can "
        "read and broadcast."
    )


# -- names of modules -------------------------------------------------------------------------

_MODULE = re.compile(
    r"module '(?P<a>\w+)[.\w]*' has no attribute"
    r"|'(?P<b>\w+)' is not a package"
    r"|cannot import name '\w+' from (?:partially initialized module )?'(?P<c>\w+)"
)
"""Errors caused by another module of the same name."""


def shadow_hint(text: str, folder: Path) -> str:
    """Return a paragraph if an error comes from a file beside the script with the name of a module, or ""."""
    names = {name for found in _MODULE.finditer(text) for name in found.groups() if name}
    for name in sorted(names):
        for path in (folder / f"{name}.py", folder / name / "__init__.py"):
            if path.is_file() and _is_elsewhere(name, path):
                shown = (path if path.stem == name else path.parent).absolute()
                return (
                    f"{shown} has the name of the module {name}, and is imported instead of it, because it "
                    "is beside the script. Rename it."
                )
    return ""


def _is_elsewhere(name: str, path: Path) -> bool:
    """Return whether there is another module of that name."""
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return found is not None and (found.origin is None or Path(found.origin).resolve() != path.resolve())
