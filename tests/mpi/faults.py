"""Ranks that fail in every way there is; for mpirun.

`faults.py KIND RANKS`: KIND is a function below, RANKS which ranks do it (`1`, `1,2,3`, `all`).  The others
wait in an exchange that never comes, or compute.
"""

import os
import signal
import sys
import threading
import time

import numpy as np

from pcldnn import communicator
from pcldnn.faults import CollectiveError


class NaNLoss(CollectiveError):
    """As training raises it: on all ranks, after the loss was summed."""


def exception(comm):
    raise ValueError(f"boom on rank {comm.rank}")


def exit_0(comm):
    sys.exit(0)


def exit_3(comm):
    sys.exit(3)


def exit_text(comm):
    sys.exit("stopped for a reason")


def killed(comm):
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt(comm):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(600)


def thread(comm):
    threading.Thread(target=exception, args=(comm,), name="loader-0", daemon=True).start()


def thread_exit(comm):
    threading.Thread(target=exit_0, args=(comm,), name="loader-0", daemon=True).start()
    time.sleep(600)


def collective(comm):
    raise NaNLoss("the loss is NaN after step 7, first in layer features.3")


def disagree(comm):
    comm.agree({"minibatch": 64, "fc6": 500 if comm.rank != 1 else 501, "classes": 10})


def posted(comm):
    """Fails while an exchange is under way."""
    buffer = np.ones(1 << 20, np.float32)
    world = comm._MPI.COMM_WORLD
    world.Ireduce_scatter(comm._MPI.IN_PLACE, buffer, [buffer.size] + [0] * (world.size - 1))
    raise ValueError(f"boom on rank {comm.rank}")


def late(comm):
    """The lower ranks fail a moment after the highest."""
    time.sleep(0.1 * (comm.size - comm.rank))
    raise ValueError(f"boom on rank {comm.rank}")


def main(comm, kind, ranks):
    print(f"rank {comm.rank} starts", flush=True)
    comm.barrier()
    if ranks == "all" or comm.rank in map(int, ranks.split(",")):
        print(f"rank {comm.rank} fails at {time.monotonic()}", flush=True)
        kind(comm)
    if os.environ.get("COMPUTE"):  # away from MPI for long
        end = time.monotonic() + 600
        while time.monotonic() < end:
            sum(range(10000))
    comm.barrier()
    comm.allgather(np.zeros(comm.size, np.float32), [1] * comm.size)
    time.sleep(600)


if __name__ == "__main__":
    with communicator.create() as comm, comm.abort_on_error():
        main(comm, globals()[sys.argv[1]], sys.argv[2])
    print(f"rank {comm.rank} reached the end")
