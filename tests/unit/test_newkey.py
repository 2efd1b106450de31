"""Key files for jobs that are started without ringrun, and the certificates in them."""

from __future__ import annotations

import resource
import stat
import subprocess
import sys

import pytest

from ringcomm import newkey
from ringcomm.errors import ConfigError
from ringcomm.storage import keys
from ringcomm.storage.keys import make_certificate, read_key
from ringcomm.transport.tls import Tls


class TestNewKey:
    def test_a_key_that_only_its_owner_can_read(self, tmp_path, capsys):
        file = tmp_path / "key"
        assert newkey.main([str(file)]) == 0
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        key, pem = read_key(None, str(file), "")
        assert len(key) == 32 and pem == "" and key.hex() not in "".join(capsys.readouterr())

    @pytest.mark.parametrize("arguments", [[], ["a", "b"], ["--other", "a"], ["--encrypt"]])
    def test_other_arguments_are_answered_with_the_usage(self, arguments, capsys):
        assert newkey.main(arguments) == 2
        assert "usage: python -m ringcomm.newkey" in capsys.readouterr().err

    def test_a_key_that_may_be_in_use_stays(self, tmp_path, capsys):
        file = tmp_path / "key"
        file.write_text("old")
        assert newkey.main([str(file)]) == 1
        assert file.read_text() == "old" and "exists already" in capsys.readouterr().err

    def test_no_means_to_make_a_certificate(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(keys, "_by_package", lambda: None)
        monkeypatch.setattr(keys.shutil, "which", lambda program: None)
        file = tmp_path / "key"
        assert newkey.main(["--encrypt", str(file)]) == 1
        assert "nothing here can make one" in capsys.readouterr().err and not file.exists()

    def test_a_disk_that_is_full_leaves_no_half_a_key(self, tmp_path, capsys):
        """It would be in the way of the next attempt: a key file is not overwritten."""
        file = tmp_path / "key"
        usual = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, usual[1]))
        try:
            assert newkey.main([str(file)]) == 1
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, usual)
        assert f"{file} cannot be written: File too large." in capsys.readouterr().err
        assert not file.exists()

    def test_as_a_program(self, tmp_path):
        done = subprocess.run(
            [sys.executable, "-m", "ringcomm.newkey", str(tmp_path / "key")], capture_output=True, check=False
        )
        assert done.returncode == 0 and (tmp_path / "key").exists()


class TestCertificate:
    @pytest.mark.skipif(keys.shutil.which("openssl") is None, reason="there is no openssl command")
    def test_by_whatever_there_is(self, monkeypatch):
        for made in (make_certificate(), keys._by_command()):
            assert made.count("-----BEGIN ") == 2
            assert Tls(made).fingerprint != Tls(make_certificate()).fingerprint
        monkeypatch.setattr(keys, "_by_package", lambda: None)
        assert Tls(make_certificate())

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("no program", "openssl"),
            ("#!/bin/sh\nexec sleep 60\n", "timed out"),
            ("#!/bin/sh\ncat >/dev/null\necho no such curve >&2; exit 1", "openssl genpkey"),
            ("#!/bin/sh\ncat >/dev/null\necho hello", "openssl genpkey"),
        ],
    )
    def test_a_program_that_makes_none(self, monkeypatch, tmp_path, text, words):
        program = tmp_path / "openssl"
        program.write_text(text)
        program.chmod(0o755)
        monkeypatch.setattr(keys.shutil, "which", lambda name: str(program))
        monkeypatch.setattr(keys, "_OPENSSL_S", 0.05 if "sleep" in text else 30.0)
        with pytest.raises(ConfigError, match=f"could not be made: .*{words}"):
            keys._by_command()
