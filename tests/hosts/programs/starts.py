"""Start the job again and again; each time say over which interfaces its links go, and when it started."""

import argparse
import json
import time

from ringcomm.job.context import Context

parser = argparse.ArgumentParser()
parser.add_argument("--starts", type=int, default=1)
parser.add_argument("--pause", type=float, default=0.0, help="seconds between two starts")
arguments = parser.parse_args()

for _ in range(arguments.starts):
    began_s = time.monotonic()
    context = Context.start()
    ended_s = time.monotonic()
    assert context._joined is not None
    table = context._joined.table.splitlines()[1:]
    print(json.dumps({"began_s": began_s, "ended_s": ended_s, "links": table}), flush=True)
    context.close()
    time.sleep(arguments.pause)
