"""Add ones up with the other ranks: prints the sum, or the error."""

import numpy as np

import ringcomm as rc

try:
    rc.init()
    print("sum", float(rc.allreduce(np.ones(1000), op=rc.Sum)[0]), flush=True)
    rc.shutdown()
except rc.errors.RingcommError as problem:
    print(type(problem).__name__, problem, flush=True)
