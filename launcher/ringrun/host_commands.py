"""``ringrun hosts`` and ``clean``: named lists of hosts, and leftovers of jobs on hosts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NoReturn, Tuple

import click

from .commands import answer, commands
from .flags import options_of, with_host_options

BRIEF = (("hosts", "Named lists."), ("clean", "Remove old files."))
"""The lines of ``ringrun --help``."""
_LIST = click.argument("name", metavar="LIST")


@commands.group(invoke_without_command=True)
@click.pass_context
def hosts(ctx: click.Context, /) -> None:
    """Keep lists of hosts, for -H LIST. Without a command: show them.

    Each is a hostfile of its own in ~/.config/ringcomm/hosts, where python=, cwd=, iface= and slots= can be
    given for a host. `ringrun doctor -H LIST` examines its hosts.
    """
    if ctx.invoked_subcommand is None:
        answer(lambda: (_all_lists(), 0))


def _all_lists() -> str:
    from ringcomm.errors import ConfigError

    from .reach.named_hosts import folder_of_lists, hosts_of_list, list_names

    lines = []
    names = list_names(os.environ)
    width = max(map(len, names), default=0)
    for name in names:
        try:
            text = ", ".join(spec.item for spec in hosts_of_list(name, os.environ) or ())
        except ConfigError as problem:
            text = f"cannot be used: {problem}"
        lines.append(f"{name:<{width}}  {text}")
    if not lines:
        return "There is no list of hosts yet. Make one: ringrun hosts add lab localhost jetson1 jetson2"
    return "\n".join([*lines, f"They are in {folder_of_lists(os.environ)}."])


@hosts.command()
@_LIST
def show(name: str) -> NoReturn:
    """Show a list as it is in its file."""
    from .reach.named_hosts import text_of_list

    answer(lambda: (text_of_list(name, os.environ), 0))


@hosts.command()
@_LIST
@click.argument("items", metavar="HOST[:SLOTS]…", nargs=-1, required=True)
def add(name: str, items: Tuple[str, ...]) -> NoReturn:
    """Add hosts to a list. It is made where there is none."""
    from .reach.named_hosts import add_hosts

    answer(lambda: (add_hosts(name, items, os.environ), 0), failed=2)


@hosts.command()
@_LIST
@click.argument("items", metavar="[HOST…]", nargs=-1)
def drop(name: str, items: Tuple[str, ...]) -> NoReturn:
    """Drop hosts from a list, or the whole list."""
    from .reach.named_hosts import drop_hosts

    answer(lambda: (drop_hosts(name, items, os.environ), 0), failed=2)


hosts.add_command(click.Command("list", callback=lambda: answer(lambda: (_all_lists(), 0)), hidden=True))
hosts.add_command(click.Command("remove", callback=drop.callback, params=drop.params, hidden=True))


@hosts.command("import")
@_LIST
@click.argument("patterns", metavar="PATTERN…", nargs=-1)
def import_hosts(name: str, patterns: Tuple[str, ...]) -> NoReturn:
    """Add the hosts of ~/.ssh/config that match, like 'jetson*'.

    Without a pattern the hosts that it has are shown.
    """
    from .reach.named_hosts import add_hosts, ssh_hosts

    def ask() -> Tuple[str, int]:
        path = Path(os.path.expanduser("~/.ssh/config"))  # noqa: PTH111  users without a home
        found = ssh_hosts(patterns, path)
        if not patterns:
            text = f"{path} has: {', '.join(found)}\nSay which, like: ringrun hosts import {name} {found[0]}"
            return text, 2
        return add_hosts(name, found, os.environ), 0

    answer(ask, failed=2)


@commands.command()
@with_host_options
@click.option("--dry-run", is_flag=True, help="Show what would be removed; remove nothing.")
def clean(dry_run: bool, **given: Any) -> NoReturn:
    """Remove caches, old job folders and records of failures.

    On this machine, and on the hosts of -H; without it on those of all lists of `ringrun hosts`. Job folders
    are the copies that --ship makes, with what ranks have written there. What a running job uses stays.
    """
    from .doctor.clean import clean_hosts

    answer(lambda: clean_hosts(options_of(given), dry_run), failed=2)
