"""Where a job's key comes from: an inherited descriptor, a file, or a variable. Never shown to anybody."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Dict, Optional

from .errors import ConfigError

_MOST_KEY_BYTES = 4096
_keys_from_pipes: Dict[int, bytes] = {}
"""A pipe can be read only once, but ``init()`` may be called again after ``shutdown()``."""


def read_key(descriptor: Optional[int], file: str, text: str) -> bytes:
    """The job's key in the first of these that is given.

    Args:
        descriptor: what ``RINGCOMM_KEY_FD`` says (``ringrun`` passes it).
        file: what ``RINGCOMM_KEY_FILE`` says, or "".
        text: what ``RINGCOMM_KEY`` says, or "".

    Raises:
        ConfigError: there is none, it cannot be read, or it is no key.
    """
    if descriptor is not None:
        try:
            raw = _read_descriptor(descriptor)
        except OSError as problem:
            raise ConfigError(
                f"RINGCOMM_KEY_FD={descriptor}: the descriptor that carries the job's key cannot be read "
                f"({problem.strerror}). A wrapper between ringrun and this process closed it; let it pass "
                "descriptors on, or start the program directly."
            ) from None
        return _decode_key(raw.decode("ascii", "replace"), "RINGCOMM_KEY_FD")
    if file:
        try:
            return _decode_key(Path(file).read_text("ascii", "replace"), f"the key file {file}")
        except OSError as problem:
            raise ConfigError(f"The key file {file} cannot be read: {problem.strerror}.") from None
    if text:
        return _decode_key(text, "RINGCOMM_KEY")
    raise ConfigError(
        "No key for this job: ranks only talk to each other with a shared secret. Start the program "
        "with ringrun, which makes one, or write 32 random hex digits or more into a file and set "
        "RINGCOMM_KEY_FILE on every host."
    )


def _read_descriptor(descriptor: int) -> bytes:
    try:
        return os.pread(descriptor, _MOST_KEY_BYTES, 0)
    except OSError as problem:
        if problem.errno != errno.ESPIPE:
            raise
    # A key is far shorter than what a pipe passes on in one piece, so one read has all of it.
    fresh = b"" if descriptor in _keys_from_pipes else os.read(descriptor, _MOST_KEY_BYTES)
    return _keys_from_pipes.setdefault(descriptor, fresh)


def _decode_key(text: str, where: str) -> bytes:
    try:
        key = bytes.fromhex(text.strip())
    except ValueError:
        raise ConfigError(f"{where} must hold hex digits only.") from None
    if len(key) < 16:
        raise ConfigError(f"{where} holds {len(key)} bytes; a key needs at least 16 (32 hex digits).")
    return key
