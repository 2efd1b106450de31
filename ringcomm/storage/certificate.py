"""Makes the certificate by which the processes of one encrypted job authenticate each other.

Python's standard library can use certificates but not make them. So this takes the ``cryptography`` package
where it is installed (``pip install 'ringcomm[encrypt]'``), and otherwise the ``openssl`` command. Only the
machine that makes the key needs either.

The certificate is self-signed, has no identity, and its dates are not checked: a process belongs to the job
if it presents this very certificate and holds its private key. So hosts without a correct clock work.
"""

from __future__ import annotations

import datetime
import shutil
import subprocess
from typing import Optional

from ..errors import ConfigError

_NAME = "ringcomm job"
_OPENSSL_S = 30.0


def make_certificate() -> str:
    """Return a new private key (P-256) and its certificate, as PEM; raises ConfigError if neither package nor
    command is installed.
    """
    made = _by_package()
    if made is None:
        made = _by_command()
    return made


def _by_package() -> Optional[str]:  # pragma: no cover - needs the cryptography package
    """Make it with the ``cryptography`` package; None without the package."""
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
