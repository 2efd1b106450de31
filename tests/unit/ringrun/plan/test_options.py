"""The table of options: what is made of one entry."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringcomm.errors import ConfigError
from ringrun.function import options_of, run
from ringrun.plan.options import PATH, PURPOSES, SWITCH, Options, table


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
