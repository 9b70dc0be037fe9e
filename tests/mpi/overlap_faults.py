"""A rank that fails, is killed or stalls at some phase of a step: `overlap_faults.py ACTION PHASE[,PHASE...]`.

Phases: a pass of a layer, on the thread that computes; update, reduce_scatter and allgather, on the communication thread.
"""

import os
import signal
import sys
import time

import numpy as np

from pcldnn import SGD, Flatten, Linear, Network, ReLU, Trainer, communicator
from pcldnn.data import ArrayDataset

STALL = 1.0  # [s]


def fail():
    raise ValueError("boom")


ACTIONS = {"raise": fail, "kill": lambda: os.kill(os.getpid(), signal.SIGKILL), "stall": lambda: time.sleep(STALL)}


def spoil(owner, name, action, when=2):
    """Have the method `owner.name` do `action` at its call number `when`."""
    method, calls = getattr(owner, name), []

    def spoilt(*arguments):
        calls.append(None)
        if len(calls) == when:
            print(f"fails at {time.monotonic()}", flush=True)
            action()
        return method(*arguments)

    setattr(owner, name, spoilt)


def main(comm, action, phases):
    data = ArrayDataset(np.ones((60, 1, 8, 8), np.float32), [0] * 60, num_classes=3)
    network = Network([Flatten(), Linear(64, 300), ReLU(), Linear(300, 3)], (1, 8, 8))
    optimizer = SGD(0.01, momentum=0.9)
    if comm.rank == comm.size - 1:
        for phase in phases:
            if phase == "update":
                spoil(optimizer, "update", action)
            elif phase in ("reduce_scatter", "allgather"):
                spoil(comm, {"reduce_scatter": "part_reduce", "allgather": "part_broadcast"}[phase], action, when=5)
            else:
                spoil(Linear, f"compute_{phase}", action)
    result = Trainer(network, optimizer, comm, threads=1).fit(data, minibatch=10, epochs=2, verbose=False)
    assert comm.has_thread
    assert result.step == 12


if __name__ == "__main__":
    with communicator.create() as comm, comm.abort_on_error():
        main(comm, ACTIONS[sys.argv[1]], sys.argv[2].split(","))
    print(f"rank {comm.rank} reached the end")
