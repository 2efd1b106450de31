"""``ringrun`` and ``python -m ringrun``: sets signal handlers before slow imports."""

import os
import sys

if __name__ == "__main__" and sys.path[:1] == [os.getcwd()]:  # noqa: PTH109  pathlib would be looked for here, too
    # `python -m` looks for modules here first, where a numpy.py may be: `ringrun` does not.
    sys.path.append(sys.path.pop(0))

import signal  # noqa: E402


def main() -> None:
    """Run the command line, and exit.

    Until a job runs, Ctrl-C ends this process immediately and without a traceback, and SIGUSR1, which
    requests a job's diagnosis, has no effect.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, lambda *_: None)  # not SIG_IGN, which programs started here would inherit

    from ringcomm.storage.files import open_standard_descriptors

    open_standard_descriptors()
    from .cli import main as run

    run()


if __name__ == "__main__":
    main()
