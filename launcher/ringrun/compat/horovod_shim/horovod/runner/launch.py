"""``horovodrun`` as a function: ``python -m horovod.runner.launch -np 2 train.py``."""

from __future__ import annotations

import sys
from typing import List, Optional


def run_commandline(args: Optional[List[str]] = None) -> None:
    """Run a command as a job, as ``horovodrun`` does, and exit.

    Args:
        args: horovodrun's arguments; None for ``sys.argv[1:]``.
    """
    from ringrun.cli import main

    words = sys.argv[1:] if args is None else list(args)
    main(words if "--horovod" in words else ["--horovod", *words])


def check_build(verbose: bool = False) -> None:
    """Show which frameworks can be used, and exit.

    Args:
        verbose: has no effect.
    """
    from ringrun.show.build import describe_build

    sys.stdout.write(describe_build())
    sys.exit(0)


if __name__ == "__main__":
    run_commandline()
