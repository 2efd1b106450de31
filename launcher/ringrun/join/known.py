"""Known machines: what a launcher keeps of a machine that has joined, and the machine of the launcher.

Both keep one key, in files of this user only: ``machines/NAME`` and ``launchers/NAME`` in the folder of the
configuration. A file is read whenever its key is to be proven, so what `ringrun hosts forget` has removed is
refused from then on, also by a launcher or a `ringrun join --stay` that runs.
"""

from __future__ import annotations

import json
import os
from typing import Callable, List, NamedTuple, Optional, Tuple

from ringcomm.errors import ConfigError, ProtocolError
from ringcomm.storage.files import read_private, write_file
from ringcomm.storage.folders import remove, trusted_folder

from ..reach.incoming import decoded, fields, text, whole
from ..reach.named_hosts import folder_of_configuration, names_in, unusable
from .proof import MACHINE_NAME, MAX_LABEL, NAME, Code

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


def keep(kind: str, name: str, known: Known, say: Callable[[str], None]) -> None:
    """Write a file, or say that it cannot be written, or that another user could change the folder."""
    place = folder_of_configuration(os.environ) / kind
    try:
        with trusted_folder(place) as folder:
            write_file(folder, name, json.dumps(known._asdict()).encode())
    except OSError as problem:
        say(f"{unusable(place / name, problem)} So the next time a code is needed, too")


def find_known(kind: str, name: str) -> Optional[Known]:
    """Return what is kept under a name, if anything; ConfigError if another user could have read it."""
    path = folder_of_configuration(os.environ) / kind / name
    if not NAME.fullmatch(name) or not os.path.lexists(path):
        return None
    try:
        with trusted_folder(path.parent, make=False):
            return Known(**decoded(read_private(path, 4096), _FILE))
    except (OSError, ProtocolError) as problem:
        raise unusable(path, problem) from None


def known_names(kind: str) -> List[str]:
    """Return the names of the machines or launchers."""
    return names_in(folder_of_configuration(os.environ) / kind, MACHINE_NAME if kind == MACHINES else NAME)


def forget(name: str) -> str:
    """Remove the key of a machine or launcher, and return a line about it."""
    kinds = [kind for kind in (MACHINES, LAUNCHERS) if name in known_names(kind)]
    if not kinds:
        raise ConfigError(f"No machine or launcher {name!r:.80} is known here: see ringrun hosts.")
    for kind in kinds:
        with trusted_folder(folder_of_configuration(os.environ) / kind, make=False) as folder:
            remove(folder, name)
    return f"{name} is forgotten: it needs a code to join again."
