"""Selects encryption: all connections are encrypted if the job's key came with a certificate."""

from __future__ import annotations

from typing import Optional

from ..errors import ConfigError
from .secure import Encryption


def encryption_of(certificate: str, insist: bool = False) -> Optional[Encryption]:
    """Return how to encrypt a job's connections, or None. Raises ConfigError if the certificate (PEM, with
    its private key) cannot be used, or if it is missing and ``insist`` (``RINGCOMM_ENCRYPT``) is set.
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
