"""How a host is reached: the command line that starts the agent there, retries, explanations of failures, and
the choice between the ways.

A way to reach hosts only has to start a program there, with its stdin and stdout connected to a process of
this machine. The agent, files, output and signals all pass through these two.
"""

from __future__ import annotations

import getpass
import re
import shlex
import socket
import threading
from pathlib import Path
from typing import Callable, Dict, FrozenSet, Iterable, List, Mapping, NamedTuple, Optional, Sequence

from ringcomm.configuration.membership import Numeric, numeric
from ringcomm.errors import ConfigError

from ..plan.hosts import Allocation, HostSpec, check_host, find_allocation
from ..plan.options import Options
from .protocol import BOOT, LocalProcess, Process

Argv = Sequence[str]
RETRIES = 5
"""Number of retries of a host after a temporary failure, like a login that sshd dropped."""
AT_ONCE = 8
"""Maximum number of simultaneous starts: all logins may pass through one jump host."""
MAX_DELAY_S = 4.0
NOTHING = "nothing"
"""Replaces the output of a program that printed nothing."""


class Failure(NamedTuple):
    """Why a host did not start; `text` is a paragraph for the user."""

    text: str
    retry: bool = False  # a retry may succeed
    no_python: bool = False  # the host lacks the interpreter
    may_appear: bool = False  # retry until the start timeout, as the host may still appear


def retry_delay_s(attempt: int, chance: float) -> float:
    """Return the seconds before a retry, counted from 1; `chance` is random in [0, 1]."""
    return (0.3 + chance) * min(MAX_DELAY_S, float(2 ** min(attempt - 1, 8)))


def quoted(text: str) -> str:
    """Return a host's text on one line without control characters, in quotation marks unless it is one word.

    >>> quoted("/home/me/a.py"), quoted("gone. Run: x")
    ('/home/me/a.py', "'gone. Run: x'")
    """
    shown = "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
    return shlex.quote(shown) if "'" not in shown else '"' + re.sub(r'(["$`\\])', r"\\\1", shown) + '"'


def last_lines(text: str) -> str:
    """Return the last two lines of an output as one, quoted and without a full stop; or NOTHING."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return quoted("; ".join(lines[-2:])[-400:].rstrip(".")) if lines else NOTHING


def quoted_path(path: str) -> str:
    """Return a path quoted for the remote shell (sh, csh or fish), which expands a leading ``~/``."""
    if re.search(r"['\\!\n]", path):
        raise ConfigError(
            f"{path!r} cannot be passed to a remote shell: it contains a quote, a backslash, an exclamation "
            "mark or a line end. Make a symbolic link without them."
        )
    if path.startswith("~/"):
        return "~/" + quoted_path(path[2:])
    return path if re.fullmatch(r"[A-Za-z0-9_./+@%:,-]+", path) else f"'{path}'"


def remote_command(python: str) -> str:
    """Return the command for the remote login shell. It contains no secret; secrets are sent over stdin."""
    return f"{quoted_path(python)} -c '{BOOT}'"


def other_python(host: str) -> str:
    """Return instructions for a host whose interpreter is not usable."""
    return f"Choose another interpreter with --python {host}=PATH, or with python=PATH in the hostfile."


class Reach:
    """One way to start programs on hosts: it makes command lines and explains their failures. `host` is the
    name that the user gave, `argv` the command line on this machine, `python` the interpreter on the host,
    `status` an exit status (negative for a signal, None if it still runs). Subclasses add explanations.
    """

    description = ""  # the way in a few words, for ``--dry-run``
    connection = "the connection to it"  # of an agent, in messages
    gets_shell = True  # ranks on other hosts get the launching shell's variables this way
    is_named = True  # options like --cwd, and ringrun doctor, can name the hosts
    dials_port = False  # hosts have dialled this machine at the port that the rendezvous has
    takes: Optional[Callable[[socket.socket], None]] = None
    """Takes connections of machines that join, which the rendezvous has accepted at its port."""

    def argv(self, spec: HostSpec, python: str) -> List[str]:
        """Return the command line that starts the agent on a host; ConfigError if an option is not usable."""
        raise NotImplementedError

    def start(self, argv: Argv) -> Process:
        """Start that command line: the pipes and methods of :class:`subprocess.Popen`; or OSError."""
        return LocalProcess(argv)

    def by_hand(self, argv: Argv) -> str:
        """Return the agent's command line up to the remote program, which the user can try."""
        return ""

    def refused(self, host: str, argv: Argv, status: Optional[int], output: str) -> Optional[Failure]:
        """Return a failure of the way itself, or None if the program there failed."""
        return None

    def lacks_python(self, python: str, status: Optional[int], output: str) -> bool:
        """Return whether the failure means that the host does not have the interpreter."""
        missing = python in output and re.search(r"not found|No such file", output, re.I)
        return status in (126, 127) or bool(missing)

    def explain_start(
        self, host: str, argv: Argv, python: str, status: Optional[int], output: str
    ) -> Failure:
        """Return why the command line ended before the agent answered."""
        output = output.replace(BOOT, "…")  # a program that is not a Python may print its arguments
        said = last_lines(output)
        old = re.search(r"^ringrun-old-python ([\d.]+) ?(.*)", output, re.M)
        if old:
            path = quoted(old.group(2).strip()) if old.group(2).strip() else python
            return Failure(
                f"{host}: the Python there is too old: {path} is {old.group(1)}, "
                f"and ringcomm needs 3.8 or newer. {other_python(host)}"
            )
        own = self.refused(host, argv, status, output)
        if own is not None:
            return own
        if self.lacks_python(python, status, output):
            text = f"{host}: there is no Python at {python} on that host ({said}). {other_python(host)}"
            return Failure(text, no_python=True)
        how = "was ended by a signal" if status is not None and status < 0 else f"ended with status {status}"
        return Failure(
            f"{host}: {python} {how} before the agent started. Its output: {said}. "
            f"Is it a Python? Try by hand: {self.by_hand(argv)}{quoted_path(python)} --version"
        )

    def explain_unstarted(self, host: str, argv: Argv, python: str, why: str) -> str:
        """Return why the command line could not be started here; `why` is the system's message."""
        what = f"{host}: {argv[0]!r} cannot be started on this machine ({why})"
        return f"{what}. Install it, or check its name."

    def explain_loss(self, host: str, status: Optional[int], output: str) -> str:
        """Return why the connection to an agent that had answered has ended."""
        how = (
            "is still open" if status is None
            else f"was ended by signal {-status}" if status < 0
            else f"ended with status {status}"
        )  # fmt: skip
        said = last_lines(output)
        tail = "" if said == NOTHING else f" Its output: {said}."
        return f"{host}: {self.connection} {how} while the job was running.{tail}"


class ThisMachine(Reach):
    """Starts programs on this machine."""

    connection = "the agent there"
    description = "this machine, no ssh"

    def argv(self, spec: HostSpec, python: str) -> List[str]:
        return [python, "-c", BOOT]

    def explain_unstarted(self, host: str, argv: Argv, python: str, why: str) -> str:
        return f"{host}: there is no Python at {python} that can be started ({why}). {other_python(host)}"


# -- ssh: the system's, with the user's configuration, which also governs the check of host keys -----------

CONNECT_TIMEOUT_S = 10
_OWN = (
    "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_TIMEOUT_S}", "-o", "ServerAliveInterval=15",
    "-o", "ServerAliveCountMax=4",
)  # fmt: skip
"""Options that ringrun adds: no prompts, a connection time limit, and keepalives."""
_NO_NAME = r"Could not resolve hostname|Name or service not known|nodename nor servname"
_STILL_STARTING = (
    _NO_NAME + r"|Connection refused|Connection closed by|Connection reset by|timed out|No route to host"
)
_DROPPED = (
    r"kex_exchange_identification|ssh_exchange_identification|Connection reset by|"
    r"Connection closed by (remote host|\S+ port)"
)
_SSH_FAILURES = (
    ("REMOTE HOST IDENTIFICATION HAS CHANGED",
     "its host key is not the one that was accepted earlier. Either the machine was reinstalled, or "
     "another machine intercepts the connection. Find out which; only then remove the old key (ssh-keygen "
     "-R {host}) and accept the new one by running once by hand: {hand}"),
    (_NO_NAME,
     "its name cannot be resolved ({output}). Check the spelling, use its address, or define the name in "
     "~/.ssh/config. By hand: {hand}"),
    (r"Host key verification failed|No \S+ host key is known",
     "its host key has not been accepted on this machine yet. Run this once by hand, compare the "
     "fingerprint and answer yes: {hand}"),
    (r"Permission denied|Too many authentication failures",
     "the login was refused ({output}). ringrun does not use passwords: install your public key there "
     "once (ssh-copy-id), or give the account as USER@HOST or the key with -i. By hand: {hand}"),
    (r"Connection refused",
     "it does not accept ssh connections ({output}). Is sshd running on it, and on this port (-p, or Port "
     "in ~/.ssh/config)? By hand: {hand}"),
    (r"timed out|No route to host|Network is unreachable|Host is down",
     "it cannot be reached ({output}; ssh's time limit is {timeout_s} s). Is it switched on, connected to "
     "this network, and not behind a firewall? By hand: {hand}"),
    (r"Bad configuration option|Bad owner or permissions|terminating, \d+ bad",
     "ssh rejects its configuration: {output}. By hand: {hand}"),
    (_DROPPED,
     "sshd dropped the connection before the login ({output}). It does so if too many logins arrive at "
     "once (MaxStartups in its sshd_config), or if it bans this address. Try again in a moment, or try by "
     "hand: {hand}"),
    ("", "the login failed: {output}. Try by hand: {hand}"),
)


class Ssh(Reach):
    """Reaches hosts by ssh; with `may_appear` hosts may still be starting."""

    connection = "the ssh connection to it"
    description = "ssh"

    def __init__(self, options: Options, may_appear: bool = False) -> None:
        self._options, self._may_appear = options, may_appear

    def argv(self, spec: HostSpec, python: str) -> List[str]:
        options = self._options
        try:
            words = shlex.split(options.ssh)
        except ValueError as problem:
            raise ConfigError(f"--ssh {options.ssh!r} cannot be parsed: {problem}.") from None
        if not words:
            raise ConfigError("--ssh is empty. Give a command, like: --ssh 'ssh -F my_config'")
        words += _OWN
        port = spec.port or options.ssh_port
        if port:
            words += ["-p", str(port)]
        if options.ssh_identity_file is not None:
            words += ["-i", options.ssh_identity_file]
        check_host(spec, "ssh")
        # Other programs, such as dropbear's, do not take it.
        end = ["--"] if words[0].rpartition("/")[2] == "ssh" else []
        return [*words, *end, spec.target, remote_command(python)]

    def by_hand(self, argv: Argv) -> str:
        return login_line(argv) + " "

    def refused(self, host: str, argv: Argv, status: Optional[int], output: str) -> Optional[Failure]:
        """Return ssh's failure, whose status is always 255, or None."""
        if status != 255:
            return None
        pattern, text = next(row for row in _SSH_FAILURES if re.search(row[0], output, re.I))
        text = text.format(
            host=host, hand=login_line(argv), output=last_lines(output), timeout_s=CONNECT_TIMEOUT_S
        )
        may_appear = self._may_appear and re.search(_STILL_STARTING, output, re.I) is not None
        return Failure(f"{host}: {text}", retry=may_appear or pattern == _DROPPED, may_appear=may_appear)


def login_line(argv: Argv) -> str:
    """Return the ssh command line for an interactive login, which the user can try."""
    return shlex.join(argv[:-1]).replace(shlex.join(_OWN) + " ", "").replace(" -- ", " ")


# -- a command template: ``--via``, like ``kubectl exec -i {host} --``, and srun ---------------------------

_JOINING = ("ssh", "rsh")
"""Programs that join their words with blanks and pass them to a remote shell, as ssh does."""
_STILL_CREATED = (
    r"ContainerCreating|PodInitializing|does not have a host assigned|is not running|container not found|"
    r"unable to upgrade connection"
)


class Via(Reach):
    """Reaches hosts by a template of words with ``{host}``, and perhaps ``{command}``, quoted for a shell."""

    def __init__(self, template: str) -> None:
        try:
            self._words = shlex.split(template)
        except ValueError as problem:
            raise ConfigError(f"--via {template!r} cannot be parsed: {problem}.") from None
        if not any("{host}" in word for word in self._words):
            raise ConfigError(
                f"--via {template!r} does not say where the host goes: write {{host}} there, like --via "
                "'kubectl exec -i {host} --', --via 'docker exec -i {host}'. (--via ssh reaches hosts by ssh "
                "also inside a scheduler's job.)"
            )
        self._joins = self._words[0].rpartition("/")[2] in _JOINING
        self._has_command = any("{command}" in word for word in self._words)
        self.description = self._words[0]
        self.connection = f"the connection to it ({self._words[0]})"

    def argv(self, spec: HostSpec, python: str) -> List[str]:
        check_host(spec, self._words[0])  # a template may pass it to a shell
        words = [word.replace("{host}", spec.target) for word in self._words]
        if self._has_command:
            return [word.replace("{command}", remote_command(python)) for word in words]
        if self._joins:
            return [*words, remote_command(python)]
        if python.startswith("~"):
            raise ConfigError(
                f"{spec.name}: no shell expands the ~ in {python} when hosts are reached by "
                f"{self._words[0]}. Give the full path."
            )
        return [*words, python, "-c", BOOT]

    def by_hand(self, argv: Argv) -> str:
        end = 1 if self._joins or self._has_command else 3
        return shlex.join(argv[:-end]) + " "

    def refused(self, host: str, argv: Argv, status: Optional[int], output: str) -> Optional[Failure]:
        """Return a failure to retry until the start timeout if a container is being created, or None."""
        if re.search(_STILL_CREATED, output, re.I) is None:
            return None
        text = f"{host}: it does not run yet ({last_lines(output)}). By hand: {self.by_hand(argv)}true"
        return Failure(text, retry=True, may_appear=True)


SRUN = (
    "srun --overlap --nodes=1 --ntasks=1 --ntasks-per-node=1 --cpu-bind=none --mpi=none --nodelist={host}"
)
"""A step of one task that shares the node's resources with other steps. Without ``--overlap`` it would wait
until they end, and with Slurm's binding all ranks of the node would share the task's single core."""
_SRUN_FAILURES = (
    (r"unrecognized option .*overlap",
     "this Slurm is older than srun's option --overlap. Steps share nodes there anyway: use --via "
     "'{older}'."),
    (r"Invalid job id|Job/step already completing|has been revoked|expired",
     "Slurm job {job} is over, so no step starts in it ({output})."),
    (r"Unable to create step|Invalid node name|node configuration",
     "Slurm starts no step there ({output}). Is it one of the nodes of job {job}, and up? `scontrol show "
     "job {job}` and `sinfo -N -l` show it."),
)


class Srun(Via):
    """Reaches nodes by ``srun``; `job` is the number of the Slurm job, for messages."""

    def __init__(self, job: str) -> None:
        super().__init__(SRUN)
        self._job = job
        self.connection = "the job step on it (srun)"

    def refused(self, host: str, argv: Argv, status: Optional[int], output: str) -> Optional[Failure]:
        """Return the failure that srun reported; None if the output is not srun's."""
        said, older = last_lines(output), SRUN.replace("--overlap ", "")
        for pattern, text in _SRUN_FAILURES:
            if re.search(pattern, output, re.I):
                return Failure(f"{host}: {text.format(job=self._job, output=said, older=older)}")
        return None


# -- the way to each host of a job ---------------------------------------------------------------

LOOKUP_LIMIT_S = 2.0
"""Time limit of name resolution, in seconds. After it the host counts as remote: ssh reports the error."""


class Doors:
    """The ways to the hosts of one job."""

    def __init__(
        self, options: Options, allocation: Optional[Allocation], joined: Optional[Mapping[str, Reach]] = None
    ) -> None:
        self._here, self._joined, self._allocation = ThisMachine(), joined or {}, allocation
        self._ssh = Ssh(options, may_appear=allocation is not None and allocation.may_appear)
        self._via = Via(options.via) if options.via is not None and options.via != "ssh" else None
        given = {options.via, options.ssh_port, options.ssh_identity_file} - {None}
        by_srun = allocation is not None and allocation.job and not given and options.ssh == "ssh"
        self._inside = Srun(allocation.job) if allocation is not None and by_srun else None
        self._addresses: Dict[str, List[Numeric]] = {}  # by the host's name, as far as they are known

    def of(self, spec: HostSpec, is_local: bool) -> Reach:
        """Return the way to a host."""
        return self._here if is_local else self._remote(spec)

    def _remote(self, spec: HostSpec) -> Reach:
        if spec.name in self._joined:
            return self._joined[spec.name]
        if self._inside is not None and self._allocation is not None:
            return self._inside if spec.name in [host.name for host in self._allocation.hosts] else self._ssh
        return self._via or self._ssh

    def in_clear(self) -> List[str]:
        """Return a line if the scheduler's way to the hosts does not encrypt this job's key."""
        if self._inside is None or self._allocation is None:
            return []
        return [
            f"the hosts of {self._allocation.title} get this job's key by {self._inside.description}, which "
            "does not encrypt it: a process that reads the network while the job starts can join the job, in "
            "spite of --encrypt. --via ssh sends it inside ssh."
        ]

    def find_local(self, specs: Sequence[HostSpec]) -> List[bool]:
        """Return whether each host is this machine; see :func:`find_local`."""
        names = [] if self._allocation is None else [self._allocation.here]
        by_name = lambda spec: not isinstance(self._remote(spec), Ssh)  # noqa: E731
        found = find_local(specs, more_names=names, by_name=by_name, answers=self._addresses)
        return [is_local and spec.name not in self._joined for spec, is_local in zip(specs, found)]

    def public_host(self, names: Iterable[str]) -> str:
        """Return the first that :meth:`find_local` has found outside private networks, or ""."""
        known = dict(self._addresses)  # a late answer of a resolver may still be added
        return next((name for name in names if any(item.is_global for item in known.get(name, ()))), "")


def allocation_of(environ: Mapping[str, str], needed: bool) -> Optional[Allocation]:
    """Return the surrounding job of a scheduler, or None; also None if it cannot be parsed, which is an error
    if it is `needed` for hosts: a finished job may have left variables and files.
    """
    try:
        return find_allocation(environ, read_text)
    except ConfigError:
        if needed:
            raise
        return None


def read_text(what: str, path: str) -> str:
    """Return the content of a UTF-8 file of the user or a scheduler; ConfigError names it by `what`."""
    try:
        # "sig": editors on Windows write a byte order mark first.
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as problem:
        raise ConfigError(f"The {what} {path} cannot be read: {problem.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"The {what} {path} is not a text file in UTF-8.") from None


# -- whether a host is this machine: then its ranks start without ssh ------------------------------
# This machine's host name is compared as text only: its address is not usable (Debian maps it to 127.0.1.1).
# The name that the user gave is resolved, and its addresses are compared with this machine's.


def is_own_name(name: str, hostname: str) -> bool:
    """Return whether a name is this machine's host name or a name of the loopback, by text. Pure."""
    given, own = name.lower().rstrip("."), hostname.lower().rstrip(".")
    if given in ("localhost", "localhost.localdomain", own):
        return True
    # The first label of this machine's name matches. A longer name than this machine's may be another host.
    return bool(given) and "." not in given and given == own.split(".")[0]


def own_addresses() -> FrozenSet[Numeric]:
    """Return every address of every interface of this machine."""
    from ringcomm.transport.nics import listed

    found = (numeric(address) for _, address, _ in listed())
    return frozenset(address for address in found if address is not None)


def find_local(
    specs: Sequence[HostSpec], more_names: Sequence[str], by_name: Callable[[HostSpec], bool],
    answers: Dict[str, List[Numeric]],
) -> List[bool]:  # fmt: skip
    """Return whether each host is this machine. A host with another user before the @ counts as remote,
    because its ranks need a login. `more_names` are further names of this machine; `by_name` tells whether a
    host's name alone decides, as for containers, whose names are not in the network. `answers` has the
    addresses that are known, and gets further ones.
    """
    hostname, user, own = socket.gethostname(), own_user(), own_addresses()

    def is_named(spec: HostSpec) -> bool:
        return spec.name in more_names or is_own_name(spec.name, hostname)

    wanted = {spec.name for spec in specs if not is_named(spec) and not by_name(spec)} - set(answers)
    threads = [threading.Thread(target=_look_up, args=(name, answers), daemon=True) for name in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LOOKUP_LIMIT_S)
    return [
        spec.user in (None, user)
        and (is_named(spec) or any(item in own or item.is_loopback for item in answers.get(spec.name, ())))
        for spec in specs
    ]


def _look_up(name: str, answers: Dict[str, List[Numeric]]) -> None:
    try:
        rows = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return  # it may be an alias in ssh's configuration; otherwise ssh reports the error
    answers[name] = [address for row in rows if (address := numeric(str(row[4][0]))) is not None]


def own_user() -> str:
    """Return this user's name, or ""."""
    try:
        return getpass.getuser()
    except (KeyError, ImportError, OSError):
        return ""  # a container's uid without a name
