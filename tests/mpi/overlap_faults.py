"""A rank that fails, is killed or stalls at a phase of training: `overlap_faults.py ACTION PHASE[,PHASE...] [FOLDER]`.

Phases: data, on a thread of the loader; a pass of a layer, on the thread that computes; update, reduce_scatter and
allgather, on the communication thread; checkpoint (in FOLDER), while it is gathered, and write, on rank 0. All but the
last happen on the last rank.
"""

import os
import signal
import sys
import time

import numpy as np

from pcldnn import SGD, Flatten, Linear, Network, ReLU, Trainer, checkpoint, communicator
from pcldnn.data import ArrayDataset

STALL = 1.0  # [s]


def fail():
    raise ValueError("boom")


ACTIONS = {"raise": fail, "kill": lambda: os.kill(os.getpid(), signal.SIGKILL), "stall": lambda: time.sleep(STALL)}


def spoil(owner, name, action, when):
    """Have the method `owner.name` do `action` at its call number `when`."""
    method, calls = getattr(owner, name), []

    def spoilt(*arguments):
        calls.append(None)
        if len(calls) == when:
            print(f"fails at {time.monotonic()}", flush=True)
            action()
        return method(*arguments)

    setattr(owner, name, spoilt)


def main(comm, action, phases, folder=None):
    data = ArrayDataset(np.ones((60, 1, 8, 8), np.float32), [0] * 60, num_classes=3)
    network = Network([Flatten(), Linear(64, 300), ReLU(), Linear(300, 3)], (1, 8, 8))
    optimizer = SGD(0.01, momentum=0.9)
    places = {
        "data": (data, "read", 7), "update": (optimizer, "update", 2), "reduce_scatter": (comm, "part_reduce", 5),
        "allgather": (comm, "part_broadcast", 5), "checkpoint": (optimizer, "state_by_layer", 1),
        "write": (checkpoint.Writer, "write", 2),
    } | {phase: (Linear, f"compute_{phase}", 2) for phase in ("forward", "weight_grad", "input_grad")}  # fmt: skip
    for phase in phases:
        if comm.rank == (0 if phase == "write" else comm.size - 1):
            owner, name, when = places[phase]
            spoil(owner, name, action, when)
    trainer = Trainer(network, optimizer, comm, threads=1)
    path = folder and f"{folder}/checkpoint.safetensors"
    result = trainer.fit(data, minibatch=10, epochs=2, verbose=False, checkpoint=path)
    assert comm.has_thread
    assert result.step == 12


if __name__ == "__main__":
    with communicator.create() as comm, comm.abort_on_error():
        main(comm, ACTIONS[sys.argv[1]], sys.argv[2].split(","), *sys.argv[3:])
    print(f"rank {comm.rank} reached the end")
