"""Every variable, good and bad; and the page that documents them."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from ringcomm import config
from ringcomm.config import Membership, Settings, Slot, document, misspelt_variables
from ringcomm.configuration import membership as environment
from ringcomm.configuration import settings
from ringcomm.configuration.membership import format_endpoint, parse_endpoint
from ringcomm.errors import ConfigError
from ringcomm.schedule import registry, select  # noqa: F401

KEY = bytes(range(32))
JOB = {"RINGCOMM_SIZE": "3", "RINGCOMM_RENDEZVOUS": "10.0.0.1:5000", "RINGCOMM_KEY": KEY.hex()}
DOCS = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"

# ---- membership ------------------------------------------------------------------------------


def test_alone_without_variables():
    assert Membership.from_environment({}) == Membership(size=1)
    assert Membership.from_environment({"RINGCOMM_SIZE": "1", "RINGCOMM_RANK": "9"}) == Membership(size=1)


@pytest.mark.parametrize("name", ["RENDEZVOUS", "RANK"])
def test_one_of_several_without_a_size_does_not_run_alone(name):
    variable = "RINGCOMM_" + name
    for size in ({}, {"RINGCOMM_SIZE": ""}):
        with pytest.raises(ConfigError, match=f"{variable}=0 means .* RINGCOMM_SIZE, their number"):
            Membership.from_environment({variable: "0", **size})
    assert Membership.from_environment({variable: "0", "RINGCOMM_SIZE": "1"}) == Membership()
    assert Membership.from_environment({variable: ""}) == Membership()


def test_membership_with_everything():
    environ = {
        **JOB, "RINGCOMM_RENDEZVOUS": "10.0.0.1:5000, [fd00::1]:5001,head:5002;172.17.0.1:5003",
        "RINGCOMM_RENDEZVOUS_MACHINE": "m", "RINGCOMM_RANK": "2", "RINGCOMM_JOB": "train",
        "RINGCOMM_SLOT": "1:0", "RINGCOMM_HOST": "jetson1",
    }
    where = (("10.0.0.1", 5000), ("fd00::1", 5001), ("head", 5002))
    assert Membership.from_environment(environ) == Membership(
        3, where, KEY, "train", Slot(1, 0), 2, "jetson1", "", (("172.17.0.1", 5003),), "m"
    )


@pytest.mark.parametrize(
    "change, words",
    [
        ({"RINGCOMM_SIZE": "three"}, "RINGCOMM_SIZE='three' is not a whole number"),
        ({"RINGCOMM_SIZE": "0"}, "RINGCOMM_SIZE=0 is out of range: it must be at least 1"),
        ({"RINGCOMM_RENDEZVOUS": ""}, "RINGCOMM_RENDEZVOUS, the address of their rendezvous, is not set"),
        ({"RINGCOMM_RENDEZVOUS": "10.0.0.1"}, "'10.0.0.1' is not an address"),
        ({"RINGCOMM_RANK": "3"}, "RINGCOMM_RANK=3 is out of range: it must be from 0 to 2"),
        ({"RINGCOMM_SLOT": "1"}, "RINGCOMM_SLOT='1' is not of the form HOST_INDEX:SLOT"),
        ({"RINGCOMM_SLOT": "a:b"}, "RINGCOMM_SLOT='a:b' is not of the form"),
        ({"RINGCOMM_KEY": ""}, "No key for this job"),
        ({"RINGCOMM_KEY": "xyz"}, "RINGCOMM_KEY must hold hex digits only"),
        ({"RINGCOMM_KEY": "00" * 15}, "RINGCOMM_KEY holds 15 bytes; a key needs at least 16"),
        ({"RINGCOMM_KEY_FD": "999999"}, "a wrapper"),
        ({"RINGCOMM_KEY_FILE": "/nowhere/key"}, "/nowhere/key cannot be read"),
        ({"RINGCOMM_KEY_FILE": "/"}, "/ cannot be read"),
    ],
)
def test_bad_membership_says_what_and_why(change, words):
    with pytest.raises(ConfigError) as caught:
        Membership.from_environment({**JOB, **change})
    assert words.lower() in str(caught.value).lower()


def test_errors_never_show_the_key():
    almost = KEY.hex() + "x"
    with pytest.raises(ConfigError) as caught:
        Membership.from_environment({**JOB, "RINGCOMM_KEY": almost})
    assert KEY.hex() not in str(caught.value)
    assert KEY.hex() not in repr(Membership.from_environment(JOB))
    assert repr(KEY) not in repr(Membership.from_environment(JOB))

# ---- endpoints -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, endpoint",
    [
        ("host:1", ("host", 1)), (" 10.0.0.1:65535 ", ("10.0.0.1", 65535)), ("[::1]:5000", ("::1", 5000)),
        ("[fe80::1%eth0]:5000", ("fe80::1%eth0", 5000)),
    ],
)
def test_endpoint(text, endpoint):
    assert parse_endpoint(text) == endpoint
    assert parse_endpoint(format_endpoint(*endpoint)) == endpoint


@pytest.mark.parametrize(
    "text",
    ["", "host", ":1", "host:", "host:0", "host:65536", "host:-1", "host:x", "host:²", "::1:5000", "[]:1"],
)
def test_no_endpoint(text):
    with pytest.raises(ConfigError, match="is not an address"):
        parse_endpoint(text)

# ---- documentation ---------------------------------------------------------------------------


def test_page_is_up_to_date():
    assert DOCS.read_text() == document(), "run: python -m ringcomm.config > docs/configuration.md"


def test_page_names_every_variable_that_is_read():
    class Recorder(dict):
        read = set()

        def get(self, key, default=None):
            self.read.add(key)
            return super().get(key, default)

        def __contains__(self, key):
            self.read.add(key)
            return super().__contains__(key)

    Membership.from_environment(Recorder(JOB))
    Settings.from_environment(Recorder(JOB))
    assert len(Recorder.read) >= 14
    assert [name for name in sorted(Recorder.read) if f"`{name}`" not in document()] == []


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("RINGCOMM_TRANSPROT", "RINGCOMM_TRANSPORT"),
        ("RINGCOMM_FUSION_TRESHOLD", "RINGCOMM_FUSION_THRESHOLD"), ("RINGCOMM_KEYFILE", "RINGCOMM_KEY_FILE"),
    ],
)
def test_a_variable_that_is_nearly_a_setting_is_pointed_out(variable, meant):
    (text,) = misspelt_variables({variable: "1", meant: "1", "PATH": "/bin"})
    assert text.startswith(f"{variable} is not a setting") and text.endswith(f"did you mean {meant}?")


@pytest.fixture
def nothing_assigned():
    yield
    environment.assign({})


def test_an_assigned_part_in_a_job_replaces_the_whole_one_in_the_environment(monkeypatch, nothing_assigned):
    for name, text in {**JOB, "RINGCOMM_RANK": "2", "RINGCOMM_LATE_AFTER": "7"}.items():
        monkeypatch.setenv(name, text)
    environment.assign({**JOB, "RINGCOMM_SIZE": "5", "RINGCOMM_IFACE": "eth1"})
    membership = Membership.from_environment()
    assert (membership.size, membership.rank, membership.key) == (5, None, KEY)
    assert Settings.from_environment().late_after_s == 7
    assert Settings.from_environment().iface == "eth1"
    assert Membership.from_environment({}).size == 1 and os.environ["RINGCOMM_SIZE"] == "3"
    environment.assign({})
    assert (Membership.from_environment().size, Membership.from_environment().rank) == (3, 2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("5:12,6:13", [(5, 12), (6, 13)]), ("", []), ("5:12", []), ("5:12,six:13", []), ("5:,6:13", [])],
)
def test_where_flight_records_go(text, expected):
    assert config.flight_channel_from_environment({"RINGCOMM_FLIGHT_FD": text}) == expected


def test_other_names_of_settings_override_the_variables(monkeypatch):
    def source(environ):
        if "OTHER_TIMEOUT" in environ:
            yield settings.SettingValue("late_after_s", environ["OTHER_TIMEOUT"], "OTHER_TIMEOUT=…", "")

    monkeypatch.setattr(settings, "aliases", [source])
    variables = {"RINGCOMM_LATE_AFTER": "5"}
    assert Settings.from_environment(variables).late_after_s == 5.0
    assert Settings.from_environment({**variables, "OTHER_TIMEOUT": "7"}).late_after_s == 7.0
    with pytest.raises(ConfigError, match="^OTHER_TIMEOUT=… cannot be used: must be"):
        Settings.from_environment({"OTHER_TIMEOUT": "soon"})

# ---- settings as text --------------------------------------------------------------------------


VALUES = [
    (settings.parse_positive_seconds, "0.5", 0.5), (settings.parse_positive_seconds, "inf", math.inf),
    (settings.parse_size, " 256KiB ", 1 << 18), (settings.parse_size, "1mb", 1 << 20),
    (settings.parse_size, "2G", 2 << 30), (settings.parse_size, "7B", 7),
    (settings.parse_size, " 0 ", 0),
    (settings.parse_seconds, "0", 0.0), (settings.parse_flag, " Yes ", True),
    (settings.parse_flag, "", False),
    (settings.parse_threads, " Auto ", "auto"), (settings.parse_threads, "4", "4"),
    (settings.parse_transport, "shm", "shm"), (settings.parse_compression, "", ""),
]  # fmt: skip

NONE = [
    (settings.parse_positive_seconds, ("0", "-1", "nan", "soon"), "must be (more than zero|a number)"),
    (settings.parse_size, ("", "0K", "-1", "K", "1.5M", "1T", "²", "1KiBB"), "number of bytes .* 1M, or 0"),
    (settings.parse_seconds, ("-1", "inf", "nan"), "zero or more seconds"),
    (settings.parse_flag, ("2", "maybe"), "must be 1 or 0"),
    (settings.parse_threads, ("0", "-1", "all", "", "²"), "must be auto, none, or a whole number"),
    (settings.parse_transport, ("", "udp"), "must be one of auto, memory, shm, unix, tcp"),
    (settings.parse_compression, ("zip",), "must be empty or one of none, fp16"),
]


@pytest.mark.parametrize(("parse", "text", "value"), VALUES)
def test_the_value_of_a_text(parse, text, value):
    found = parse(text)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(("parse", "texts", "words"), NONE)
def test_texts_without_a_value(parse, texts, words):
    for text in texts:
        with pytest.raises(ValueError, match=words):
            parse(text)


@pytest.mark.parametrize(
    ("given", "used", "topics"),
    [
        ({"compression": "none"}, [], []),
        ({"compression": "int8", "local_steps": "auto"}, [], ["no compression", "no local steps"]),
        ({"compression": "int8", "local_steps": "auto"}, ["compression"], ["no local steps"]),
        ({"local_steps": "8"}, ["local_steps"], []),
    ],
)
def test_settings_without_effect(monkeypatch, given, used, topics):
    monkeypatch.setattr(settings, "_used", set())
    for name in used:
        settings.use(name)
    assert [topic for topic, _ in settings.without_effect(Settings(**given))] == topics
