"""The table of options: what is made of one entry."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ringcomm.errors import ConfigError
from ringrun.function import options_of, run
from ringrun.plan.options import PATH, PURPOSES, SWITCH, Options, table

SHIM = Path(__file__).parents[4] / "launcher" / "ringrun" / "compat" / "horovod_shim"

TRIAL = """
import dataclasses, inspect, sys
from ringrun.plan import options

entry = options._option(
    None, "--trial", options.OUTPUT, "A trial. It is new.", metavar="WORD", brief="Try it.", argument="trial",
    horovod="trial_of_horovod", doctor=True,
)
options.Options = dataclasses.make_dataclass(
    "Options", [("trial", "str", entry)], bases=(options.Options,), frozen=True
)

from click.testing import CliRunner
from horovod.runner import run as horovods_run
from ringrun import cli, commands, flags, function
from ringrun.job import launch

shown = CliRunner().invoke(cli.ringrun, ["--help"]).output
assert "  --trial WORD        Try it." in shown and "It is new." not in shown
assert "A trial. It is new." in " ".join(CliRunner().invoke(cli.ringrun, ["--help-all"]).output.split())
assert "--trial WORD" in CliRunner().invoke(commands.doctor, ["--help"]).output
assert "| `--trial WORD` | A trial. It is new. |" in flags.document(cli.ringrun)
assert "trial" in inspect.signature(function.run).parameters
assert "\\n    trial: a trial. It is new.\\n" in inspect.getdoc(function.run)
assert list(inspect.signature(horovods_run).parameters)[-1] == "trial_of_horovod"
assert "\\n    trial_of_horovod: a trial. It is new.\\n" in inspect.getdoc(horovods_run)

given = []
cli._run = lambda chosen, command, dry_run: given.append(chosen.trial)
cli.ringrun(["--trial", "flag", "x"], standalone_mode=False)
def prepare(chosen, *_, **__):
    given.append(chosen.trial)
    raise KeyboardInterrupt
function.prepare = prepare
for call, name in ((function.run, "trial"), (horovods_run, "trial_of_horovod")):
    try:
        call(print, **{name: name})
    except KeyboardInterrupt:
        pass
assert given == ["flag", "trial", "trial_of_horovod"], given
"""


def test_an_entry_of_the_table_appears_everywhere() -> None:
    program = f"import sys; sys.path.insert(0, {str(SHIM)!r})\n{TRIAL}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_option_is_described() -> None:
    for item, option in table():
        assert option.purpose in PURPOSES and option.doc.endswith("."), item.name
        assert option.flags and all(flag.startswith("-") for flag in option.flags)
        is_file = (option.metavar or "").split(".")[0] in ("FILE", "FOLDER")
        assert (option.kind in (PATH, SWITCH)) == is_file, item.name


def test_arguments_become_options() -> None:
    by_host = {"far": "/p", None: Path("/q"), "x": None}
    found = options_of({"env": {"A": "1"}, "python": by_host, "np": 2, "iface": None})
    assert found == Options(forward=("A=1",), python=("far=/p", "/q"), np=2)
    found = options_of({"ssh_identity_file": Path("k"), "output_dir": Path("o"), "ssh": "s"})
    assert found == Options(ssh_identity_file="k", output_dir="o", ssh="s")
    with pytest.raises(TypeError, match="unexpected keyword argument 'nope'"):
        options_of({"nope": 1})
    with pytest.raises(TypeError, match="'nump'. Did you mean 'np'.$"):
        options_of({"nump": 1})
    with pytest.raises(ConfigError, match="console=3 is not a console"):
        run(print, console=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="iface=3 is not a string"):
        run(print, iface=3)
