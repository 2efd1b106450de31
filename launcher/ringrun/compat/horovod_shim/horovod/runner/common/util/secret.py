"""Random keys."""

from __future__ import annotations

import secrets

HOROVOD_SECRET_KEY = "_HOROVOD_SECRET_KEY"


def make_secret_key() -> bytes:
    """32 random bytes."""
    return secrets.token_bytes(32)
