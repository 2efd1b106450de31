"""Take calls that only Linux has away from a Python process: those that the variable ``ABSENT`` lists.

With ``name`` this Python has no such call, with ``name!`` the system refuses it. ``darwin`` takes what Python
on macOS does not have, and sets ``sys.platform``.
"""

import builtins
import ctypes
import errno
import io
import os
import resource
import select
import signal
import sys
import time


def refuse(*_args, **_named):
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


OS_ON_LINUX = (
    "memfd_create", "MFD_CLOEXEC", "MFD_ALLOW_SEALING", "sched_getaffinity", "sched_setaffinity",
    "O_TMPFILE", "O_PATH",
    "O_DIRECT", "posix_fallocate", "posix_fadvise", "splice", "eventfd", "pidfd_open",
    "copy_file_range", "getrandom", "sched_setscheduler", "getresuid", "setresuid", "removexattr",
    "getxattr", "setxattr", "listxattr", "P_PIDFD", "fdatasync", "pipe2",
)  # fmt: skip
WANTED = list(filter(None, os.environ.get("ABSENT", "").split(",")))
if "epoll!" in WANTED:
    select.epoll = refuse
elif "epoll" in WANTED or "darwin" in WANTED:
    for _name in dir(select):
        if _name.lower().startswith("epoll"):
            delattr(select, _name)
if "darwin" in WANTED:
    for _name in OS_ON_LINUX:
        if hasattr(os, _name):
            delattr(os, _name)

import socket  # noqa: E402 - it imports modules that look for these calls

FOLDERS = ("/proc", "/sys", "/dev/shm")
OS = ("memfd_create", "posix_fallocate", "sched_getaffinity", "sched_setaffinity", "O_PATH")
PSUTIL = ("net_if_stats", "net_if_addrs")
OPTIONS = ("TCP_INFO", "TCP_CONGESTION", "SO_PEERCRED", "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
LIBRARY = ("process_vm_readv", "madvise", "prctl")


NOT_ON_MACOS = {
    socket: (
        "MSG_CMSG_CLOEXEC", "MSG_NOSIGNAL", "MSG_ERRQUEUE", "SO_PEERCRED", "SO_BINDTODEVICE", "SO_MARK",
        "SO_PASSCRED", "SCM_CREDENTIALS", "TCP_INFO", "TCP_CONGESTION", "TCP_KEEPIDLE", "TCP_USER_TIMEOUT",
        "TCP_QUICKACK", "TCP_CORK", "TCP_DEFER_ACCEPT", "TCP_SYNCNT", "AF_NETLINK", "AF_PACKET", "AF_VSOCK",
        "SOCK_CLOEXEC", "SOCK_NONBLOCK", "IP_BIND_ADDRESS_NO_PORT", "IP_TRANSPARENT",
    ),
    signal: ("sigtimedwait", "sigwaitinfo", "SIGRTMIN", "SIGRTMAX", "SIGPWR", "SIGSTKFLT"),
    time: ("CLOCK_BOOTTIME", "CLOCK_TAI", "pthread_getcpuclockid", "clock_settime"),
    resource: ("prlimit", "RUSAGE_THREAD"),
}  # fmt: skip


def take(module, name, refused):
    if refused:
        setattr(module, name, refuse)
    else:
        delattr(module, name)


def hide_folder(folder):
    def hidden(function):
        def look(path=".", *args, **named):
            text = os.fspath(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
            text = os.fsdecode(text)
            if text == folder or text.startswith(folder + "/"):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), text)
            return function(path, *args, **named)

        return look

    builtins.open = io.open = hidden(io.open)
    for name in ("open", "stat", "lstat", "listdir", "readlink", "statvfs", "scandir", "access"):
        setattr(os, name, hidden(getattr(os, name)))


def refuse_option(number):
    def refusing(name):
        function = getattr(socket.socket, name)

        def option(self, level, which, *rest):
            if which == number and level == (socket.SOL_SOCKET if number == peercred else socket.IPPROTO_TCP):
                refuse()
            return function(self, level, which, *rest)

        setattr(socket.socket, name, option)

    peercred = getattr(socket, "SO_PEERCRED", None)
    refusing("getsockopt")
    refusing("setsockopt")


def refuse_abstract_names():
    def refusing(name):
        function = getattr(socket.socket, name)

        def on(self, address):
            if isinstance(address, (str, bytes)) and address[:1] in ("\0", b"\0"):
                refuse()
            return function(self, address)

        setattr(socket.socket, name, on)

    for name in ("bind", "connect", "connect_ex"):
        refusing(name)


class Refused:
    def __call__(self, *_args):
        ctypes.set_errno(errno.ENOSYS)
        return -1


def take_from_library(name, refused):
    find = ctypes.CDLL.__getattr__

    def found(self, wanted):
        if wanted != name:
            return find(self, wanted)
        if not refused:
            raise AttributeError(wanted)
        return Refused()

    ctypes.CDLL.__getattr__ = found


def be_darwin():
    import sysconfig
    import tempfile

    import psutil  # noqa: F401 - its modules are those of the platform

    sysconfig.get_config_vars()  # reads a file that has the platform in its name
    tempfile._O_TMPFILE_WORKS = False  # it may have been imported before this module
    for module, names in NOT_ON_MACOS.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    for folder in FOLDERS:
        hide_folder(folder)
    for name in ("process_vm_readv", "prctl"):
        take_from_library(name, False)
    refuse_abstract_names()
    sys.platform = "darwin"


def main():
    for item in WANTED:
        name, refused = item.rstrip("!"), item.endswith("!")
        if name in FOLDERS:
            hide_folder(name)
        elif name in OS:
            take(os, name, refused)
        elif name in PSUTIL:
            import psutil

            setattr(psutil, name, refuse)
        elif name in OPTIONS:
            if refused:
                refuse_option(getattr(socket, name))
            else:
                delattr(socket, name)
        elif name in LIBRARY:
            take_from_library(name, refused)
        elif name == "darwin":
            be_darwin()
        elif name == "epoll":
            pass  # taken already
        elif name == "abstract_names":
            refuse_abstract_names()
        elif name == "ioctl":
            import fcntl

            fcntl.ioctl = refuse
        else:
            raise ValueError(f"ABSENT: {name!r}")


main()
