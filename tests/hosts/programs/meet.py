"""Every rank meets rank 0 where MASTER_ADDR and MASTER_PORT say; and what ranks are told is true."""

import os
import socket
import time

import horovod.common.basics

import ringcomm as rc

hvd = horovod.common.basics.HorovodBasics()
hvd.init()
for name in ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"):
    assert os.environ["HOROVOD_" + name.upper()] == str(getattr(hvd, name)()), name
told = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
assert told == [str(found()) for found in (hvd.rank, hvd.size, hvd.local_rank, hvd.local_size)]

where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if hvd.rank() == 0:
    family = socket.AF_INET6 if ":" in where[0] else socket.AF_INET
    with socket.create_server(("", where[1]), family=family) as server:
        rc.barrier()
        met = []
        for _ in range(hvd.size() - 1):
            connection, _address = server.accept()
            met.append(connection.recv(8).decode())
            connection.close()
    print("met", *sorted(met), flush=True)
else:
    rc.barrier()
    with socket.create_connection(where, 10) as connection:
        connection.sendall(str(hvd.rank()).encode())
        time.sleep(0.1)
rc.barrier()
