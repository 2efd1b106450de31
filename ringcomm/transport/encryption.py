"""Selects encryption: if the job's key came with a certificate, all connections are encrypted."""

from __future__ import annotations

from typing import Optional

from ..errors import ConfigError
from .secure import Encryption


def encryption_of(certificate: str, insist: bool = False) -> Optional[Encryption]:
    """The way to encrypt a job's connections, or None if they are not to be.

    Args:
        certificate: PEM of the certificate that came with the job's key and of its private key, or "".
        insist: the value of ``RINGCOMM_ENCRYPT``: whether a missing certificate is an error.

    Raises:
        ConfigError: there is no certificate although encryption is required, or it cannot be used.
    """
    if not certificate:
        if insist:
            raise ConfigError(
                "RINGCOMM_ENCRYPT=1, but no certificate came with the job's key. Make a key file that has "
                "one (`python -m ringcomm.newkey --encrypt FILE`), copy it to every host and set "
                "RINGCOMM_KEY_FILE; or start the program with `ringrun --encrypt`, which does that."
            )
        return None
    try:
        from .tls import Tls
    except ImportError as problem:
        raise ConfigError(f"This Python was built without ssl, so it cannot encrypt: {problem}.") from None
    return Tls(certificate)
