"""``python -m ringcomm.newkey [--encrypt] FILE``: a key for jobs that are started without ringrun."""

from __future__ import annotations

import secrets
import sys
from typing import Sequence

from .errors import ConfigError
from .storage.files import write_private
from .storage.keys import key_text, make_certificate

USAGE = """usage: python -m ringcomm.newkey [--encrypt] FILE

Writes a new key to FILE, which only your user may read. With --encrypt a certificate comes with it, and all
TCP connections of jobs with this key are encrypted. Copy the file to every host and set RINGCOMM_KEY_FILE."""


def main(arguments: Sequence[str]) -> int:
    """Write the file; return the exit code."""
    files = [item for item in arguments if not item.startswith("-")]
    options = set(arguments) - set(files)
    if len(files) != 1 or options - {"--encrypt"}:
        print(USAGE, file=sys.stderr)
        return 2
    try:
        text = key_text(secrets.token_bytes(32), make_certificate() if options else "")
        # An existing file is not overwritten, because its key may be in use.
        write_private(files[0], (text.rstrip() + "\n").encode("ascii"), replace=False)
    except FileExistsError:
        print(f"{files[0]} exists already, and its key may be in use. Choose another name, or remove it "
              "first.", file=sys.stderr)  # fmt: skip
        return 1
    except OSError as problem:
        print(f"{files[0]} cannot be written: {problem.strerror}.", file=sys.stderr)
        return 1
    except ConfigError as problem:
        print(problem, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
