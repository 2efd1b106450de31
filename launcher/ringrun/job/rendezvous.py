"""The job's rendezvous: its interface to the supervisor, its addresses, and the ranks' variables for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Dict, List, Mapping, Sequence, Tuple

from ringcomm.configuration.membership import format_endpoint, is_loopback, numeric
from ringcomm.errors import ConfigError
from ringcomm.rendezvous.membership import Notice, Seat

from ..elastic.job import ElasticJob
from ..plan.job import HostJob, Job

if TYPE_CHECKING:
    from ringcomm.rendezvous.server import RendezvousServer  # imported when a job of several ranks starts

OpenRendezvous = Callable[[Callable[[Notice], None]], "RendezvousServer"]


def rendezvous_for(job: Job) -> OpenRendezvous:
    """Return a function that opens the ``RendezvousServer`` of a job; its argument receives the notices."""

    def open_it(notify: Callable[[Notice], None]) -> RendezvousServer:
        from ringcomm.rendezvous.server import RendezvousServer
        from ringcomm.transport.secure import encryption_of

        elastic = isinstance(job, ElasticJob)
        places = () if elastic else job.plan.places  # those of an elastic job are announced one by one
        return RendezvousServer(
            key=job.key, job=job.id, notify=notify, start_timeout_s=job.settings.start_timeout_s,
            addresses=rendezvous_addresses(job),
            seats=[Seat(job.slot_of(place.rank), job.host_of(place.rank).name) for place in places],
            limits=job.limits if isinstance(job, ElasticJob) else None, launched=elastic,
            encryption=encryption_of(job.certificate), port=job.port, joining=job.joining,
        )  # fmt: skip

    return open_it


def rendezvous_addresses(job: Job) -> List[str]:
    """Return the addresses on which the rendezvous listens: the loopback if all ranks are on this machine,
    else the addresses that ranks of this machine may use. ConfigError if no interface matches.

    ``--iface`` restricts traffic between ranks: it does not apply if no rank is on this machine, and in an
    elastic job only if this machine has such an interface.
    """
    if job.all_local:
        return ["127.0.0.1"]
    from ringcomm.transport.nics import LOOPBACK, own_addresses

    spec = next((host.env.get("RINGCOMM_IFACE", "") for host in job.hosts if host.is_local), "")
    try:
        addresses = own_addresses(job.settings.iface if job.is_elastic else spec)
    except ConfigError:
        if not job.is_elastic:
            raise
        addresses = own_addresses()
    # A link-local address is not usable on another host without the name of that host's interface.
    found = [item for item in addresses if not item.scope]
    if not job.is_elastic and all(item.kind == LOOPBACK for item in found):
        raise ConfigError(
            "This machine has no network address except the loopback's"
            + (f" that matches --iface {spec}" if spec else "")
            + ", but the job's other hosts must reach it. `ip address` lists the addresses."
        )
    return [item.address for item in found]


def rendezvous_variables(
    endpoints: Sequence[Tuple[str, int]], host: HostJob, facts: Mapping[str, Any]
) -> Dict[str, str]:
    """Return the variables with the addresses of the rendezvous, for the ranks of a host with these `facts`.

    Other hosts cannot use the loopback. An address of a virtual interface may exist on several hosts: ranks
    try such addresses last, and skip those that their own host has. A machine that has joined may have
    dialled a router, which forwards the port to this machine.
    """
    from ringcomm.transport.nics import VIRTUAL, machine, own_addresses

    usable = [item for item in endpoints if host.is_local or not is_loopback(item[0])]
    if not usable:
        return {}
    real = {item.address for item in own_addresses() if item.kind != VIRTUAL}
    first = [item for item in usable if item[0] in real or is_loopback(item[0])]
    last = [item for item in usable if item not in first]
    login = str(facts.get("login", "")).split()
    if host.reach.dials_port and len(login) == 4 and login[1].isdigit():
        first = list(dict.fromkeys([*first, (login[0], int(login[1]))]))
    groups = [",".join(format_endpoint(*item) for item in group) for group in (first, last) if group]
    return {"RINGCOMM_RENDEZVOUS": ";".join(groups), "RINGCOMM_RENDEZVOUS_MACHINE": machine()}


def master_variables(job: Job, host: HostJob, facts: Mapping[int, Mapping[str, Any]]) -> Dict[str, str]:
    """Return ``MASTER_ADDR`` and ``MASTER_PORT`` for the ranks of a host, except for those the user passes.

    They are the rendezvous of ``torch.distributed`` without ringcomm: rank 0's host, and a port that was free
    there when its agent started (`facts`: by host, :func:`ringrun.agent.checks.master_facts`).
    """
    first = job.host_of(0)
    found = {
        "MASTER_PORT": str(facts[first.index]["port"]),
        "MASTER_ADDR": _master_address(job, first, facts),
    }
    if not {*found, "RANK", "WORLD_SIZE"} & set(host.env):
        found["RINGCOMM_MASTER"] = f"{found['MASTER_ADDR']},{found['MASTER_PORT']},{job.plan.size}"
    return {name: value for name, value in found.items() if name not in host.env}


def _master_address(job: Job, first: HostJob, facts: Mapping[int, Mapping[str, Any]]) -> str:
    """Return an address of rank 0's host that the other hosts reach: an ssh login from or to it has used it.

    A name may resolve differently on other hosts, and an alias of ``~/.ssh/config`` does not resolve there.
    """
    if len(job.hosts) == 1 or job.all_local:
        return "127.0.0.1"
    if not first.is_local:
        _, server = _login(facts[first.index])
        return server or first.name
    own = [address for address in rendezvous_addresses(job) if not is_loopback(address)]
    seen = {numeric(_login(facts[host.index])[0]) for host in job.hosts if not host.is_local}
    return next((address for address in own if numeric(address) in seen), own[0])


def _login(facts: Mapping[str, Any]) -> Tuple[str, str]:
    """Return the addresses of an agent's ssh connection, the launcher's first; "" if not usable elsewhere."""
    words = str(facts.get("login", "")).split()
    if len(words) != 4:
        return "", ""
    client, server = ("" if "%" in word or is_loopback(word) else word for word in (words[0], words[2]))
    return client, server
