"""Runs cells with `rc.run` in a real kernel, and writes their outputs as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Dict, List

import nbformat
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec
from nbclient import NotebookClient

BEGIN = """
import ringcomm as rc

def train(steps):
    import sys, time
    import numpy as np
    rc.init()
    print("rank", rc.rank(), "begins")
    for step in range(steps):
        if rc.rank() == 0:
            print(f"\\rstep {step + 1}/{steps}", end="", file=sys.stderr, flush=True)
        rc.allreduce(np.ones(2))
        if step == steps // 2:
            time.sleep(0.5)  # so that a state of the progress bar is shown
    if rc.rank() == 0:
        print(file=sys.stderr)
    print("rank", rc.rank(), "ends")
    if steps == 7:
        raise KeyError("no such sample")
    return rc.rank() + steps
"""


def outputs(cells: List[str]) -> List[List[Dict[str, Any]]]:
    """The outputs of each cell, run one after the other."""
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(text) for text in cells]
    manager = AsyncKernelManager()
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    manager._kernel_spec = KernelSpec(argv=argv, display_name="test", language="python")
    NotebookClient(notebook, km=manager, timeout=240, allow_errors=True).execute()
    return [cell["outputs"] for cell in notebook.cells]


if __name__ == "__main__":
    run = "rc.run(train, args=({},), np=2)"
    found = outputs([BEGIN, run.format(200), run.format(7)])
    Path(sys.argv[1]).write_text(json.dumps({"cells": found}))
