"""The command ``ringrun doctor``."""

from __future__ import annotations

import time
from typing import Any, List, NoReturn

import click

from ringcomm.errors import RingcommError

from ..job.launch import Options, prepare
from ..reach.ssh import SshOptions
from ..show.visible import visible
from .findings import all_findings
from .network import examine
from .report import as_json, as_text, problems

EPILOG = "A program of this name is started by its path: ringrun ./doctor."


@click.command(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("-np", "--num-proc", "np", type=click.IntRange(min=1), metavar="N", help="The number of ranks.")
@click.option("-H", "--hosts", metavar="HOST[:SLOTS],…", help="The hosts, with their slots (default 1).")
@click.option("--hostfile", "-hostfile", metavar="FILE", help="The hosts, one per line.")
@click.option("--python", "pythons", multiple=True, metavar="[HOST=]PATH", help="The ranks' interpreter.")
@click.option("--cwd", "cwds", multiple=True, metavar="[HOST=]DIR", help="The ranks' directory.")
@click.option("--iface", "ifaces", multiple=True, metavar="[HOST=]SPEC",
              help="Interfaces to use, as for a job: eth0,!wlan*,192.168.1.0/24.")  # fmt: skip
@click.option("--via", metavar="TEMPLATE", help="Reach hosts by a command, like 'docker exec -i {host}'.")
@click.option("--ssh", default="ssh", metavar="COMMAND", help="The ssh command, with options if needed.")
@click.option("-p", "--ssh-port", type=click.IntRange(1, 65535), metavar="PORT", help="The ssh port.")
@click.option("-i", "--ssh-identity-file", metavar="FILE", help="The private key for ssh.")
@click.option("--json", "as_data", is_flag=True, help="Print everything as JSON.")
def doctor(as_data: bool, **given: Any) -> NoReturn:
    """Find what keeps hosts from training together.

    Logs in to all hosts, asks each for its interfaces, processors, memory, limits and packages, has them dial
    each other as the ranks of a job do, and measures every pair on the route that a job takes. Each problem
    comes with what to do. Exit code 0 if no problem was found (notes are none), otherwise 1.
    """
    options = Options(
        np=given["np"], hosts=given["hosts"], hostfile=given["hostfile"], pythons=given["pythons"],
        cwds=given["cwds"], ifaces=given["ifaces"], ship_self=False, via=given["via"],
        ssh=SshOptions(given["ssh"], given["ssh_port"], given["ssh_identity_file"]),
    )  # fmt: skip
    began = time.monotonic()
    try:
        found = examine(prepare(options, ["true"]))
    except RingcommError as problem:
        click.echo(f"ringrun: {visible(str(problem))}", err=True)
        raise SystemExit(2) from None
    findings = all_findings(found)
    if as_data:
        click.echo(as_json(found, findings), nl=False)
    else:
        click.echo(visible(as_text(found, findings)), nl=False)
        plural = "" if len(found.hosts) == 1 else "s"
        click.echo(f"Examined {len(found.hosts)} host{plural} in {time.monotonic() - began:.1f} s.")
    raise SystemExit(1 if problems(findings) else 0)


def run_doctor(words: List[str]) -> NoReturn:
    """Run the command with these arguments, and exit."""
    doctor.main(args=words, prog_name="ringrun doctor")
    raise AssertionError("click exits")
