"""Reads a job's key from an inherited descriptor, a file, or a variable. It is never printed or logged.

The text is the key in hex digits, and behind it, if the job's connections are encrypted, the certificate and
the private key by which its processes authenticate each other, as PEM. ``ringrun`` makes both; without it
``python -m ringcomm.newkey [--encrypt] FILE`` does.
"""

from __future__ import annotations

import errno
import os
import shlex
from typing import Dict, Optional, Tuple

from ..errors import ConfigError
from .files import Exposed, read_private

_MAX_KEY_BYTES = 16384
_STDERR = 2
_PEM = "-----BEGIN "
_keys_from_pipes: Dict[int, bytes] = {}
"""A pipe can be read only once, but ``init()`` may be called again after ``shutdown()``."""


def key_text(key: bytes, certificate: str) -> str:
    """Return a key, and a certificate or "", as :func:`read_key` reads them."""
    return f"{key.hex()}\n{certificate}" if certificate else key.hex()


def read_key(descriptor: Optional[int], file: str, text: str) -> Tuple[bytes, str]:
    """Return the job's key, and its certificate or "", from the first of the values of ``RINGCOMM_KEY_FD``,
    ``RINGCOMM_KEY_FILE`` and ``RINGCOMM_KEY`` that is given. Raises ConfigError if there is no key, or it
    cannot be read, others may read it, or it is malformed.
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
