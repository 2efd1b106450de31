"""How the ranks of a group find each other: over the store that ``init_process_group`` has.

Rank 0 of the group serves a rendezvous on addresses of its own and writes into the store where it is.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
import threading
from dataclasses import replace
from datetime import timedelta
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ...config import Membership, Settings, host_from_environment, key_from_environment
from ...errors import ConfigError, ProtocolError, StartupError
from ...rendezvous.client import Joined, join
from ...rendezvous.embedded import EmbeddedRendezvous

logger = logging.getLogger("ringcomm.torch")

_DEFAULT_TIMEOUT_S = 1800.0
_SILENCE_S = 600.0
"""What PyTorch passes if the user says nothing."""
_FAREWELL_NAME = "ringcomm-farewell"
_warned = False


class Meeting(NamedTuple):
    """A group that has come together.

    Attributes:
        joined: this rank's place and links.
        settings: in force for the group.
        embedded: the rendezvous, on the rank that serves it.
    """

    joined: Joined
    settings: Settings
    embedded: Optional[EmbeddedRendezvous]

    def end(self, wait: bool = False, failed: bool = False) -> None:
        """The rank that serves the rendezvous goes on serving until all have said goodbye.

        Args:
            wait: until then; otherwise a thread sees to it, for which the program's end waits.
            failed: whether the group has failed. Then not all may be able to.
        """
        if self.embedded is None:
            return
        if wait:
            self.embedded.stop(failed)
        else:
            threading.Thread(target=self.embedded.stop, args=(failed,), name=_FAREWELL_NAME).start()


def group_settings(timeout: timedelta) -> Settings:
    """The settings for a group to which PyTorch has given this timeout."""
    settings = Settings.from_environment()
    timeout_s = timeout.total_seconds()
    # PyTorch's own default is half an hour; whoever leaves it gets what RINGCOMM_TIMEOUT says.
    silence_s = (settings.timeout_s or _SILENCE_S) if timeout_s == _DEFAULT_TIMEOUT_S else timeout_s
    return replace(settings, timeout_s=silence_s, start_timeout_s=max(timeout_s, 1.0))


def meet(store: Any, rank: int, ranks: Sequence[int], name: str, settings: Settings) -> Meeting:
    """Link up with the other ranks of a group. All of them call it.

    Args:
        store: the group's own part of PyTorch's store.
        rank: this process's rank in the group.
        ranks: the ranks of the whole job that the group consists of.
        name: the group's name.

    Raises:
        StartupError: (or one of its kinds) the group could not be put together.
        ConfigError: it shall be encrypted, but nobody has handed a certificate to the ranks.
    """
    # Whoever uses one store for several jobs, one after another, must not find the last one's entry.
    turn = (store.add("ringcomm/arrivals", 1) - 1) // len(ranks)
    entry = f"ringcomm/rendezvous/{turn}"
    secret = key_from_environment()
    if secret is None and settings.encrypt:
        raise ConfigError(
            "RINGCOMM_ENCRYPT=1 needs a key file with a certificate: PyTorch's store, over which the ranks "
            "would agree on a key, is open to all who can reach it. Make a file with `python -m "
            "ringcomm.newkey --encrypt FILE`, copy it to every host and set RINGCOMM_KEY_FILE; or use "
            "`ringrun --encrypt`."
        )
    embedded: Optional[EmbeddedRendezvous] = None
    if rank == 0:
        embedded = _serve(store, entry, len(ranks), name, secret, settings)
    where = _read(store, entry, settings, len(ranks))
    host = host_from_environment() or socket.gethostname()
    membership = Membership(
        size=len(ranks),
        rendezvous=tuple((str(address), int(port)) for address, port in where["endpoints"]),
        key=secret[0] if secret is not None else bytes.fromhex(where["key"]),
        job=str(where["job"]),
        rank=rank,
        host=host if ranks[rank] == rank else f"{host}, rank {ranks[rank]} of all",
        certificate="" if secret is None else secret[1],
    )
    try:
        return Meeting(join(membership, settings), settings, embedded)
    except BaseException:
        if embedded is not None:
            embedded.stop()
        raise


def _serve(
    store: Any, entry: str, size: int, name: str, secret: Optional[Tuple[bytes, str]], settings: Settings
) -> EmbeddedRendezvous:
    """Start the rendezvous and write into the store where it is, or why there is none."""
    job = f"torch-{name}-{secrets.token_hex(8)}"
    notice: Dict[str, Any] = {"job": job}
    if secret is None:
        _warn_of_open_store()
        secret = secrets.token_bytes(32), ""
        notice["key"] = secret[0].hex()
    key, certificate = secret
    try:
        embedded, notice["endpoints"] = EmbeddedRendezvous.serve(key, certificate, job, size, settings)
    except StartupError as problem:
        store.set(entry, json.dumps({"problem": str(problem)}))
        raise
    store.set(entry, json.dumps(notice))
    return embedded


def _warn_of_open_store() -> None:
    global _warned
    if not _warned:
        _warned = True
        logger.warning(
            "no key was given (RINGCOMM_KEY_FILE, or ringrun), so one was agreed upon over PyTorch's store: "
            "whoever can read the store can join this job."
        )


def _read(store: Any, entry: str, settings: Settings, size: int) -> Dict[str, Any]:
    try:
        store.wait([entry], timedelta(seconds=settings.start_timeout_s))
    except RuntimeError as problem:
        raise StartupError(
            f"Rank 0 of this group of {size} has not opened its rendezvous within "
            f"{settings.start_timeout_s:g} s: {str(problem).splitlines()[0]}"
        ) from None
    where = json.loads(store.get(entry))
    if "problem" in where:
        raise StartupError(f"Rank 0 of this group could not open its rendezvous: {where['problem']}")
    endpoints: List[Any] = where.get("endpoints", [])
    if not endpoints or "job" not in where:
        raise ProtocolError(f"the store's entry {entry!r} is not what ringcomm writes there")
    return where  # type: ignore[no-any-return]
