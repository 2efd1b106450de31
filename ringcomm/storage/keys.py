"""The key of a job, and the certificate of an encrypted one. They are never printed or logged.

A key's text is hex digits, and behind them, if the job's connections are encrypted, the certificate and its
private key as PEM. It comes by an inherited descriptor, a file, or a variable.

Python's standard library can use certificates but not make them. That takes the ``cryptography`` package
(``pip install 'ringcomm[encrypt]'``) or the ``openssl`` command, on the machine that makes the key only. The
certificate has no identity, and its dates are not checked: a process belongs to the job if it presents this
very certificate and holds its private key. So hosts without a correct clock work.
"""

from __future__ import annotations

import datetime
import errno
import os
import shlex
import shutil
import subprocess
from typing import Dict, Optional, Tuple

from ..errors import ConfigError
from .files import Exposed, read_private

_MAX_KEY_BYTES = 16384
_STDERR = 2
_PEM = "-----BEGIN "
_NAME = "ringcomm job"
_OPENSSL_S = 30.0
_keys_from_pipes: Dict[int, bytes] = {}
"""A pipe can be read only once, but ``init()`` may be called again after ``shutdown()``."""


def key_text(key: bytes, certificate: str) -> str:
    """Return a key, and a certificate or "", as :func:`read_key` reads them."""
    return f"{key.hex()}\n{certificate}" if certificate else key.hex()


def read_key(descriptor: Optional[int], file: str, text: str) -> Tuple[bytes, str]:
    """Return the job's key, and its certificate or "", from the first of the values of ``RINGCOMM_KEY_FD``,
    ``RINGCOMM_KEY_FILE`` and ``RINGCOMM_KEY`` that is given; ConfigError if none is there, or usable.
    """
    if descriptor is not None:
        try:
            raw = _read_descriptor(descriptor)
        except OSError as problem:
            raise ConfigError(
                f"RINGCOMM_KEY_FD={descriptor}: the descriptor that carries the job's key cannot be read "
                f"({problem.strerror}). A wrapper between ringrun and this process closed it; let it pass "
                "descriptors on, or start the program directly. In a process that a rank has started "
                '(multiprocessing, subprocess) do not call init(): put it under `if __name__ == "__main__":`.'
            ) from None
        return _decode_key(raw.decode("ascii", "replace"), "RINGCOMM_KEY_FD")
    if file:
        return _decode_key(_read_key_file(file), f"the key file {file}")
    if text:
        return _decode_key(text, "RINGCOMM_KEY")
    raise ConfigError(
        "No key for this job: ranks authenticate each other with a shared secret. Start the program "
        "with ringrun, which makes one, or make a file with `python -m ringcomm.newkey FILE`, copy it to "
        "every host and set RINGCOMM_KEY_FILE there."
    )


def _read_key_file(file: str) -> str:
    """Return the text of a file of this user or of the administrator that no other user can read."""
    try:
        return read_private(file, _MAX_KEY_BYTES).decode("ascii", "replace")
    except Exposed as problem:
        raise ConfigError(
            f"The key file {file} is refused: {problem.strerror}, so other users of this machine may have "
            f"the key. Run chmod 600 {shlex.quote(file)}; if there are others, make a new key."
        ) from None
    except OSError as problem:
        raise ConfigError(f"The key file {file} cannot be read: {problem.strerror}.") from None


def _read_descriptor(descriptor: int) -> bytes:
    if descriptor > _STDERR:
        os.set_inheritable(descriptor, False)  # programs that this process starts have no use for the key
    try:
        return os.pread(descriptor, _MAX_KEY_BYTES, 0)
    except OSError as problem:
        if problem.errno != errno.ESPIPE:
            raise
    # A pipe passes a key, which is short, on in one piece, so one read has all of it.
    fresh = b"" if descriptor in _keys_from_pipes else os.read(descriptor, _MAX_KEY_BYTES)
    return _keys_from_pipes.setdefault(descriptor, fresh)


def _decode_key(text: str, where: str) -> Tuple[bytes, str]:
    digits, begin, rest = text.partition(_PEM)
    try:
        key = bytes.fromhex(digits.strip())
    except ValueError:
        raise ConfigError(
            f"{where} must hold hex digits only (and behind them a certificate, if the job encrypts)."
        ) from None
    if len(key) < 16:
        raise ConfigError(f"{where} holds {len(key)} bytes; a key needs at least 16 (32 hex digits).")
    return key, begin + rest


def make_certificate() -> str:
    """Return a new private key (P-256) and its certificate, as PEM; ConfigError if nothing can make them."""
    return _by_package() or _by_command()


def _by_package() -> Optional[str]:  # pragma: no cover - needs the cryptography package
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        return None
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime(2000, 1, 1))
        .not_valid_after(datetime.datetime(9999, 12, 31))
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return str((private + certificate.public_bytes(serialization.Encoding.PEM)).decode("ascii"))


def _by_command() -> str:
    """Make it with the ``openssl`` command. The private key goes through pipes, not a file or argv."""
    program = shutil.which("openssl")
    if program is None:
        raise ConfigError(
            "Encryption needs a certificate, and nothing here can make one. Install the package "
            "(pip install 'ringcomm[encrypt]') or the openssl command (apt install openssl) on the machine "
            "that starts the job; the others need neither."
        )
    private = _openssl(program, b"", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256")
    certificate = _openssl(
        program, private, "req", "-x509", "-new", "-sha256", "-key", "/dev/stdin", "-subj", f"/CN={_NAME}",
        "-days", "36500",
    )  # fmt: skip
    return (private + certificate).decode("ascii", "replace")


def _openssl(program: str, given: bytes, *arguments: str) -> bytes:
    try:
        done = subprocess.run(
            [program, *arguments], input=given, capture_output=True, check=False,
            timeout=_OPENSSL_S,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise ConfigError(f"The job's certificate could not be made: {program}: {problem}") from None
    if done.returncode or not done.stdout.startswith(b"-----BEGIN "):
        output = " ".join(done.stderr.decode("utf-8", "replace").split()[-40:])
        raise ConfigError(
            f"The job's certificate could not be made: `{program} {arguments[0]}` ended with "
            f"{done.returncode}{': ' + output if output else ''}. ringcomm[encrypt] does not need it."
        )
    return done.stdout
