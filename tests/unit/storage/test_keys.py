"""Where the key of a job comes from, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ringcomm import config
from ringcomm.config import Membership
from ringcomm.errors import ConfigError
from ringcomm.storage import keys
from tests.unit.test_config import JOB, KEY


def key_from(**variables):
    environ = {"RINGCOMM_SIZE": "2", "RINGCOMM_RENDEZVOUS": "h:1"}
    environ.update({"RINGCOMM_" + name: str(value) for name, value in variables.items()})
    return Membership.from_environment(environ).key


@pytest.mark.parametrize("content, text", [(b"", "holds 0 bytes"), (bytes(range(256)), "hex digits only")])
def test_malformed_key_file_is_refused(tmp_path, content, text):
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(0o400)
    with pytest.raises(ConfigError, match=text):
        key_from(KEY_FILE=path)


def test_a_certificate_behind_the_key(tmp_path):
    path = tmp_path / "key"
    path.write_text("ab" * 16 + "\n-----BEGIN CERTIFICATE-----\nMII=\n")
    path.chmod(0o600)
    membership = Membership.from_environment({**JOB, "RINGCOMM_KEY": "", "RINGCOMM_KEY_FILE": str(path)})
    assert membership.key == b"\xab" * 16
    assert membership.certificate == "-----BEGIN CERTIFICATE-----\nMII=\n"
    assert "MII" not in repr(membership)


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_key_file_that_others_can_read_is_refused_with_the_command_that_mends_it(tmp_path, mode):
    path = tmp_path / "my key"
    path.write_text(KEY.hex())
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"its mode is {mode:04o}.* chmod 600 '{path}'") as caught:
        key_from(KEY_FILE=path)
    assert KEY.hex() not in str(caught.value)


def test_children_do_not_inherit_the_keys_descriptor(tmp_path):
    path = tmp_path / "key"
    path.write_text(KEY.hex())
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.set_inheritable(descriptor, True)
        assert key_from(KEY_FD=descriptor) == KEY
        look = f"import os; os.fstat({descriptor})"
        done = subprocess.run([sys.executable, "-c", look], close_fds=False, capture_output=True, text=True)
        assert done.returncode == 1 and "Bad file descriptor" in done.stderr
    finally:
        os.close(descriptor)


def test_key_from_a_pipe_again_and_again(monkeypatch):
    monkeypatch.setattr(keys, "_keys_from_pipes", {})
    reader, writer = os.pipe()
    try:
        os.write(writer, KEY.hex().encode())
        # The writer stays open: reading must not wait for its end.
        assert [key_from(KEY_FD=reader) for _ in range(3)] == [KEY] * 3
    finally:
        os.close(reader)
        os.close(writer)


def test_descriptor_comes_before_file_before_variable(tmp_path):
    other, third = b"f" * 16, b"v" * 16
    path, descriptor_path = tmp_path / "file", tmp_path / "descriptor"
    path.write_text(other.hex() + "\n")
    path.chmod(0o600)
    descriptor_path.write_text(KEY.hex())
    descriptor = os.open(str(descriptor_path), os.O_RDONLY)
    try:
        assert key_from(KEY_FD=descriptor, KEY_FILE=path, KEY=third.hex()) == KEY
        assert key_from(KEY_FILE=path, KEY=third.hex()) == other
        assert key_from(KEY=third.hex()) == third
    finally:
        os.close(descriptor)


def test_a_key_without_the_rest_of_a_job():
    assert config.key_from_environment({}) is None
    assert config.key_from_environment({"RINGCOMM_KEY": "ab" * 16}) == (b"\xab" * 16, "")
    with pytest.raises(ConfigError):
        config.key_from_environment({"RINGCOMM_KEY": "short"})
