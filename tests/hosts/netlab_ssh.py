"""The files of a lab's SSH: keys, one sshd_config per host, and one client configuration for all of them."""

from __future__ import annotations

import shutil
import stat
import uuid
from pathlib import Path
from typing import Dict, List, Sequence

from tests.hosts.netlab_system import TOOL_PATH, LabError, sh

SSHD_CONFIG = """\
Port 22
{listen}
HostKey {dir}/host_key
AuthorizedKeysFile {top}/client_key.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
StrictModes no
PrintMotd no
PidFile none
LogLevel INFO
"""

CLIENT_COMMON = """\
Host *
    User root
    BatchMode yes
    StrictHostKeyChecking yes
    UserKnownHostsFile {top}/known_hosts
    GlobalKnownHostsFile /dev/null
    UpdateHostKeys no
    IdentitiesOnly yes
    IdentityAgent none
    PreferredAuthentications publickey
    ConnectTimeout 10
    KexAlgorithms curve25519-sha256
    LogLevel ERROR
"""

CLIENT_ENTRY = """\
Host {patterns}
    HostName {address}
    HostKeyAlias {alias}
    IdentityFile {top}/{key}
"""

HOSTS_FILE = """\
127.0.0.1 localhost
127.0.1.1 {name}
::1 localhost ip6-localhost ip6-loopback
"""


def make_key(path: Path) -> str:
    """Make an ed25519 key without a passphrase and return the public half."""
    sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.name, "-f", str(path))
    kind, key = path.with_suffix(".pub").read_text().split()[:2]
    return f"{kind} {key}"


def write_host(top: Path, name: str, addresses: Sequence[str], chroot: bool = False) -> None:
    """Write the directory of one host: sshd's files, and those that are bound over /etc and /proc in it.

    With `chroot`, a login sees the folder `root` in that directory as its root file system.
    """
    directory = top / name
    directory.mkdir()
    public = make_key(directory / "host_key")
    with (top / "known_hosts").open("a") as known:
        known.write(f"{name} {public}\n")
    listen = "\n".join(f"ListenAddress {address}" for address in addresses)
    config = SSHD_CONFIG.format(listen=listen, dir=directory, top=top)
    if chroot:
        config += f"ChrootDirectory {directory / 'root'}\n"
    (directory / "sshd_config").write_text(config)
    (directory / "hosts").write_text(HOSTS_FILE.format(name=name))
    (directory / "hostname").write_text(name + "\n")
    (directory / "boot_id").write_text(f"{uuid.uuid4()}\n")
    (directory / "machine-id").write_text(f"{uuid.uuid4().hex}\n")


def write_client(top: Path, addresses: Dict[str, List[str]]) -> Path:
    """Write the client's configuration and a wrapper `bin/ssh` that uses it; returns the configuration.

    A host is found by its name and by each of its addresses. Two further entries lead to the first host and
    fail: `unknownkey` (its key is not in known_hosts) and `badkey` (it does not accept our key).
    """
    text = ""
    for name, own in addresses.items():
        patterns = " ".join([name, *own])
        text += CLIENT_ENTRY.format(patterns=patterns, address=own[0], alias=name, top=top, key="client_key")
    first, own = next(iter(addresses.items()))
    for name, alias, key in (("unknownkey", "unknownkey", "client_key"), ("badkey", first, "wrong_key")):
        text += CLIENT_ENTRY.format(patterns=name, address=own[0], alias=alias, top=top, key=key)
    config = top / "ssh_config"
    config.write_text(text + CLIENT_COMMON.format(top=top))
    real = shutil.which("ssh", path=TOOL_PATH)
    if real is None:
        raise LabError("no ssh on this machine")
    wrapper = top / "bin" / "ssh"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {real} -F {config} "$@"\n')
    wrapper.chmod(stat.S_IRWXU)
    return config
