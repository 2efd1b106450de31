"""The output of ``ringrun doctor``."""

from __future__ import annotations

import time
from typing import Tuple

from ..job.launch import prepare
from ..plan.options import Options
from .findings import all_findings
from .network import examine
from .report import as_json, as_text, problems


def run_doctor(options: Options, as_data: bool) -> Tuple[str, int]:
    """Examine hosts and the network between them; return the text (JSON if `as_data`) and the exit code: 1 if
    there is a problem, else 0.
    """
    began = time.monotonic()
    found = examine(prepare(options, ["true"]))
    findings = all_findings(found)
    code = 1 if problems(findings) else 0
    if as_data:
        return as_json(found, findings), code
    plural = "" if len(found.hosts) == 1 else "s"
    took = f"Examined {len(found.hosts)} host{plural} in {time.monotonic() - began:.1f} s.\n"
    return as_text(found, findings) + took, code
