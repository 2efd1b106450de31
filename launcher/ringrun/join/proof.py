"""The code or the key by which a machine joins, the proof that both ends have it, and the keys that are kept.

Four messages of fixed sizes, 346 bytes together, come before anything that is parsed::

    joining machine                                                launcher
        hello: magic, version, kind, name, share, fingerprint  ->
                                           <-  hello: the same of the launcher
        proof, 32 bytes                                        ->
                                           <-  proof, 32 bytes; zeros if the other one is wrong

    transcript = SHA-256 of both hellos
    proof      = HMAC-SHA256(key, role | transcript)

The key comes from SPAKE2 (package ``spake2``: Ed25519, with its fixed points M and N), so an attacker cannot
test codes against recorded or changed messages: each connection is one guess, which the launcher counts.
The joining machine proves first, so a guess that is not counted shows nothing. The transcript has both ends'
names and the fingerprints of their TLS certificates; the roles keep a message from being reflected. Without
the package the code has 26 letters, which are a key of 130 bits themselves, and the shares are nonces, as
for the key that both ends keep for the next time: so a recorded proof is no proof in another connection.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import socket
import struct
from enum import IntEnum
from importlib.util import find_spec
from typing import Any, Callable, List, NamedTuple, Optional, Tuple

from ringcomm.errors import AuthenticationError, ConfigError, ProtocolError
from ringcomm.storage.files import read_private, write_file
from ringcomm.storage.folders import remove, trusted_folder
from ringcomm.wire.auth import JOIN_MAGIC

from ..reach.base import own_user
from ..reach.incoming import decoded, fields, text, whole
from ..reach.named_hosts import folder_of_configuration, names_in, unusable

VERSION = 2
HELLO = struct.Struct("!8sHH64s33s32s")
PROOF_BYTES = 32
MAX_CODE_LABEL, MAX_LABEL = 999, 65535
KEPT = 3  # the kind of a code that both ends keep
WRONG_CODES = 3  # so many end an invitation, and the attempts of a joining machine
CODE_S = 600.0  # for so long an invitation is open
NO_PROOF = bytes(PROOF_BYTES)

_LETTERS = "abcdefghijkmnpqrstuvwxyz23456789"  # of a long code: none that look alike
_LONG, _WORDS = 26, 3
_CONSONANTS, _VOWELS = "bdfghjklmnprstvz", "aiou"
"""Of a short code: each word is consonant, vowel, consonant, vowel, consonant, 16 bits that can be spoken."""
# Of a host: no address, no path, and no number, as join:2 stands for two machines.
MACHINE_NAME = re.compile(r"(?![0-9]+$)[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}")  # of either end, like alice@laptop
FORM_OF_NAME = "at most 63 letters, digits, - and _, a letter or digit first, and not only digits"
_FILE_NAME = re.compile(rf"{NAME.pattern}(\+[A-Za-z0-9_-]{{1,63}})?")  # see :func:`launcher_key`


Role = IntEnum("Role", "JOINING LAUNCHER")


class WrongCode(AuthenticationError):
    """The other end does not have this code."""


class Code(NamedTuple):
    """A code: the public number by which discovery finds its launcher, and the secret."""

    label: int
    secret: str
    is_kept: bool = False  # for known machines

    @property
    def kind(self) -> int:
        """How the key comes from it: 1: by SPAKE2, 2: the secret is a key, KEPT: and both ends keep it."""
        return KEPT if self.is_kept else 2 if len(self.secret) == _LONG else 1

    @property
    def shown(self) -> str:
        return "-".join([str(self.label), *re.findall(".{26}|.{5}", self.secret)])


def new_code(spoken: Optional[bool] = None) -> Code:
    """Return a fresh code: of 48 secret bits for SPAKE2, if that is installed, or of 130."""
    label = secrets.randbelow(MAX_CODE_LABEL) + 1
    if not (find_spec("spake2") if spoken is None else spoken):
        return Code(label, "".join(secrets.choice(_LETTERS) for _ in range(_LONG)))
    pattern = (_CONSONANTS, _VOWELS, _CONSONANTS, _VOWELS, _CONSONANTS) * _WORDS
    return Code(label, "".join(secrets.choice(letters) for letters in pattern))


def new_key() -> Code:
    """Return a key of 256 bits for both ends to keep."""
    label = secrets.randbelow(MAX_LABEL - MAX_CODE_LABEL) + MAX_CODE_LABEL + 1
    return Code(label, secrets.token_hex(32), True)


def why_over(wrong: int, left_s: float) -> str:
    """Return after what no machine can join any more: so many wrong codes, or no time left; or ""."""
    return "three wrong codes" if wrong >= WRONG_CODES else "10 minutes" if left_s <= 0 else ""


def parse_code(text: str) -> Code:
    """A code as it was typed, with any hyphens, blanks and capitals."""
    text = re.sub("[\u2010-\u2015]", "-", text).strip(" \t\r\n`'\".").lower()  # as documents change it
    found = re.fullmatch(r"(\d{1,3})[\s-]+([a-z0-9\s-]+)", text, re.ASCII)
    secret = re.sub(r"[\s-]", "", found[2]) if found else ""
    word = f"[{_CONSONANTS}][{_VOWELS}][{_CONSONANTS}][{_VOWELS}][{_CONSONANTS}]"
    if not found or not re.fullmatch(rf"({word}){{{_WORDS}}}|[{_LETTERS}]{{{_LONG}}}", secret):
        raise ConfigError(
            "That is no code. One is a number and three words of five letters, like 7-lusab-babad-gutih, "
            "or a number and 26 letters. ringrun shows it on the machine that starts the job."
        )
    return Code(int(found[1]), secret)


class Proof:
    """One end of the exchange: send `hello`, `meet` the other's, `check` its proof, send `own`."""

    def __init__(self, role: Role, code: Code, name: str, fingerprint: bytes) -> None:
        self._role, self._code = role, code
        self._other = Role.LAUNCHER if role == Role.JOINING else Role.JOINING
        self._exchange: Any = None
        share = bytes([role]) + os.urandom(32)
        if code.kind == 1:
            try:
                from spake2 import SPAKE2_A, SPAKE2_B
            except ImportError:
                raise ConfigError(
                    "This machine lacks the package spake2, which codes of three words need: "
                    "pip install 'ringcomm[join]'."
                ) from None
            side = SPAKE2_A if role == Role.JOINING else SPAKE2_B
            self._exchange = side(code.shown.encode(), idA=b"joining", idB=b"launcher")
            share = self._exchange.start()
        self.hello = HELLO.pack(JOIN_MAGIC, VERSION, code.kind, name.encode(), share, fingerprint)
        self._key = self._transcript = self.peer_fingerprint = b""
        self.peer_name = ""

    def meet(self, hello: bytes) -> None:
        """Take the other end's hello."""
        magic, version, kind, name, share, fingerprint = HELLO.unpack(hello)
        if magic != JOIN_MAGIC:
            raise ProtocolError("it is not a ringrun that joins or invites")
        if version != VERSION:
            raise ProtocolError(f"it has version {version} of joining, this machine {VERSION}")
        if kind != self._code.kind:
            raise ProtocolError("its code is of another kind (three words, or 26 letters)")
        self._key, self.peer_name = self._key_with(share), name.rstrip(b"\0").decode("ascii", "replace")
        if not NAME.fullmatch(self.peer_name):
            raise ProtocolError("its name is not valid")
        self.peer_fingerprint = fingerprint
        both = self.hello + hello if self._role == Role.JOINING else hello + self.hello
        self._transcript = hashlib.sha256(b"ringcomm join\0" + both).digest()

    def _key_with(self, share: bytes) -> bytes:
        if self._exchange is None:
            if share[0] != self._other:
                raise ProtocolError("its share is not valid")
            secret = f"{self._code.kind} {self._code.label} {self._code.secret}"
            return hashlib.sha256(b"ringcomm join key\0" + secret.encode()).digest()
        from spake2 import SPAKEError
        from spake2.ed25519_basic import NotOnCurve

        try:
            return bytes(self._exchange.finish(share))
        except (SPAKEError, NotOnCurve, ValueError, AssertionError):
            raise ProtocolError("its share is not valid") from None

    def _tag(self, label: bytes) -> bytes:
        return hmac.new(self._key, label + b"\0" + self._transcript, hashlib.sha256).digest()

    @property
    def own(self) -> bytes:
        """This end's proof."""
        return self._tag(self._role.name.encode())

    def check(self, proof: bytes) -> None:
        """Compare the other end's proof."""
        if not hmac.compare_digest(proof, self._tag(self._other.name.encode())):
            kind = AuthenticationError if self.by_key else WrongCode
            raise kind(f"it does not have this {'key' if self.by_key else 'code'}")

    @property
    def by_key(self) -> bool:
        return self._code.is_kept

    def tag_of(self, key: Code) -> str:
        """Return what proves, in this connection, that an end has the key of an earlier one."""
        return hmac.new(key.secret.encode(), b"known\0" + self._transcript, hashlib.sha256).hexdigest()

    @property
    def digits(self) -> str:
        """Four digits that both ends show."""
        return f"{int.from_bytes(self._tag(b'digits')[:4], 'big') % 10000:04d}"


# -- keys that are kept --------------------------------------------------------------------------

MACHINES, LAUNCHERS = "machines", "launchers"
KEY = {"label": whole(1, MAX_LABEL), "secret": text(64, "[0-9a-f]{64}")}
_FILE = fields({**KEY, "here": text(63), "host": text(255), "port": whole(0, 65535)})


class Known(NamedTuple):
    """The key that both ends have; at a machine also its name in jobs, and where it has met the launcher."""

    label: int
    secret: str
    here: str = ""
    host: str = ""
    port: int = 0

    @property
    def code(self) -> Code:
        return Code(self.label, self.secret, True)

    @property
    def address(self) -> Tuple[str, int]:
        return self.host, self.port


def launcher_key(launcher: str, here: str) -> str:
    """Return the name under which this machine, with its own name in jobs, keeps the key of a launcher."""
    return f"{launcher}+{here}"


def keep(kind: str, name: str, known: Known, say: Callable[[str], None]) -> bool:
    """Write a file; return whether that was possible. Otherwise say why not."""
    place = folder_of_configuration(os.environ) / kind
    try:
        with trusted_folder(place) as folder:
            write_file(folder, name, json.dumps(known._asdict()).encode())
    except OSError as problem:
        say(f"{unusable(place / name, problem)} So the next time a code is needed, too")
        return False
    return True


def find_known(kind: str, name: str) -> Optional[Known]:
    """Return what is kept under a name, if anything; ConfigError if another user could have read it."""
    path = folder_of_configuration(os.environ) / kind / name
    if not _FILE_NAME.fullmatch(name) or not os.path.lexists(path):
        return None
    try:
        with trusted_folder(path.parent, make=False):
            return Known(**decoded(read_private(path, 4096), _FILE))
    except (OSError, ProtocolError) as problem:
        raise unusable(path, problem) from None


def known_names(kind: str) -> List[str]:
    """Return the names under which keys of machines or of launchers are kept."""
    place = folder_of_configuration(os.environ) / kind
    return names_in(place, MACHINE_NAME if kind == MACHINES else _FILE_NAME)


def known_launchers() -> List[str]:
    """Return the launchers of which a key is kept."""
    return sorted({name.partition("+")[0] for name in known_names(LAUNCHERS)})


def drop(kind: str, name: str) -> None:
    """Remove the key that is kept under a name."""
    with trusted_folder(folder_of_configuration(os.environ) / kind, make=False) as folder:
        remove(folder, name)


def forget(name: str) -> str:
    """Remove the keys of a machine or launcher, and return a line about it."""
    machines = [kept for kept in known_names(MACHINES) if kept == name]
    launchers = [kept for kept in known_names(LAUNCHERS) if name in (kept, kept.partition("+")[0])]
    if not (machines or launchers):
        raise ConfigError(f"No machine or launcher {name!r:.80} is known here: see ringrun hosts.")
    here = [own_name()] if machines else [kept.partition("+")[2] for kept in launchers]
    for kind, kept in [*((MACHINES, it) for it in machines), *((LAUNCHERS, it) for it in launchers)]:
        try:
            drop(kind, kept)
        except OSError as problem:
            raise ConfigError(f"The key of {kept} is not removed: {problem.strerror}.") from None
    there = " and ".join(f"ringrun hosts forget {each}" for each in here)
    return f"{name} is forgotten. Before they can meet again with a code, the other end needs {there}, too."


def own_name() -> str:
    """Return this user and machine, as the other end shows them."""
    name = f"{own_user() or os.getuid()}@{socket.gethostname()}"[:64]
    return name if NAME.fullmatch(name) else "ringrun"
