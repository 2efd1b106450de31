"""Which look-ups of environment variables are the program's own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Dict, Iterator, List

import pytest

from ringcomm.configuration import environment, lookups
from ringcomm.configuration.lookups import Lookups, is_installed

LAUNCHED = {"RINGCOMM_FLIGHT_FD": "3:1,4:2", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "1"}


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a job of several hosts; afterwards nothing is observed."""
    plain = type(os.environ)
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RINGCOMM_ELASTIC", raising=False)
    monkeypatch.setattr(environment, "_observer", environment._observer)
    yield
    os.environ.__class__ = plain


def run(text: str, file: str = "/home/me/train.py", name: str = "__main__", **names: Any) -> Dict[str, Any]:
    """Execute a text as a file of the user's."""
    found: Dict[str, Any] = {"__name__": name, **names}
    exec(compile(text, file, "exec"), found)
    return found


def begun() -> Lookups:
    """Look-ups from now on; the names in this file's code do not count as known."""
    own = Lookups()
    own.begin()
    own.take()
    own._known.clear()
    return own


def observed(text: str, **where: Any) -> List[str]:
    """The names that are new after this text has run."""
    own = begun()
    run(text, **where)
    return own.take()


@pytest.mark.parametrize(
    "text",
    [
        "os.environ.get('STEPS', '3')",
        "os.getenv('STEPS')",
        "'STEPS' in os.environ",
        "os.environ.get('ST' + 'EPS')",
        "os.path.expandvars('$STEPS/data')",
        "try:\n    os.environ['STEPS']\nexcept KeyError:\n    pass",
    ],
)
def test_all_forms_of_a_look_up_are_seen(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STEPS", raising=False)
    assert observed(f"import os\n{text}\n{text}") == ["STEPS"]


def test_values_and_errors_stay_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPS", "7")
    before = dict(os.environ)
    text = (
        "import os\nassert os.environ['STEPS'] == '7' and 'NO_SUCH' not in os.environ\n"
        "try:\n    os.environ[7]\nexcept TypeError:\n    pass\nelse:\n    raise AssertionError\n"
    )
    assert observed(text) == ["STEPS", "NO_SUCH"]
    assert dict(os.environ) == before and os.environ.copy() == before


@pytest.mark.parametrize(
    "text",
    [
        "dict(os.environ)",
        "{**os.environ}",
        "os.environ.copy()",
        "dict(os.environ.items())",
        "[os.environ[name] for name in os.environ]",
        "for name in os.environ.keys():\n    os.environ[name]",
    ],
)
def test_a_copy_of_all_variables_looks_up_none_of_them(text: str) -> None:
    assert observed(f"import os\n{text}\nos.getenv('STEPS')") == ["STEPS"]


def test_a_library_looks_up_for_itself_or_for_the_program() -> None:
    library = "import os\ndef read(name):\n    return os.environ.get(name)"
    own = run(library, "/usr/lib/python3/site-packages/torch/x.py", "torch.x")["read"]
    click = run(library, "/usr/lib/python3/site-packages/click/core.py", "click.core")["read"]
    assert observed("read('TORCH_X')", read=own) == []
    assert observed("read('STEPS')", read=click) == ["STEPS"]
    assert observed("read('RINGCOMM_X')", read=run(library, "/src/ringcomm/x.py", "ringcomm.x")["read"]) == []
    made = run(library, "<string>", "torch.y")["read"]
    assert observed("read('MADE')", read=made) == []
    assert observed("import os\nos.getenv('STEPS')", file="<string>") == ["STEPS"]


def test_what_was_looked_up_before_the_import_of_ringcomm_is_in_the_programs_code() -> None:
    own = Lookups()
    text = (
        "import os\nSTEPS = os.environ.get('STEPS')\ndef rate():\n    return os.getenv('LR', 'a default')\n"
        "begin()\nNAME = 'LATER'"
    )
    run(text, begin=own.begin)
    assert own.take()[:3] == ["STEPS", "LATER", "LR"]
    other = Lookups()
    run("TEXT = 'NO_READER'\nbegin()", begin=other.begin)
    assert "NO_READER" not in other.take()


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({}, True),
        ({"RINGCOMM_FLIGHT_FD": ""}, False),
        ({"LOCAL_WORLD_SIZE": "3"}, False),
        ({"LOCAL_WORLD_SIZE": "3", "RINGCOMM_ELASTIC": "1"}, True),
    ],
)
def test_only_jobs_of_several_hosts_are_recorded(
    changes: Dict[str, str], counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    assert bool(observed("import os\nos.getenv('STEPS')")) is counts


def test_news_are_told_at_once_and_there_is_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    own, told = begun(), []
    own.on_new = lambda: told.extend(own.take())
    run("import os\nos.getenv('STEPS')\nos.getenv('LR')\nos.getenv('STEPS')\nos.getenv('not a name')")
    assert told == ["STEPS", "LR"]
    monkeypatch.setattr(lookups, "_MAX_NAMES", 3)
    run("import os\nfor number in range(9):\n    os.getenv(f'NAME_{number}')")
    assert told == ["STEPS", "LR", "NAME_0"]


def test_what_is_installed_is_known_by_its_place() -> None:
    assert is_installed(Path("/x/site-packages/torch/__init__.py"))
    assert is_installed(Path(os.__file__).resolve())
    assert not is_installed(Path("/home/me/train.py"))


def test_another_object_in_the_place_of_the_environment_is_left_alone() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", dict(LAUNCHED))
        assert observed("import os\nos.environ.get('STEPS')") == []
