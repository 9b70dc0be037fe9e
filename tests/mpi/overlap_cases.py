"""Trainings with and without the communication thread, for tests/test_overlap.py; prints one digest a case."""

import hashlib
import sys

import numpy as np
from mpi4py import MPI

from pcldnn import SGD, Conv2d, Dropout, Flatten, Linear, MaxPool2d, Network, ReLU, communicator, schedule


def network():
    """Small layers at first, one that goes in pieces at the end."""
    return Network([Conv2d(1, 6, 3), ReLU(), MaxPool2d(2), Conv2d(6, 11, 3), ReLU(), MaxPool2d(2), Flatten(),
                    Linear(11 * 25, 500), ReLU(), Dropout(0.5), Linear(500, 10)], (1, 28, 28), seed=3)  # fmt: skip


def train(comm, bandwidth, steps=4, optimizer=None):
    """Digest of weights and momentum after some steps on made-up images, each rank with its share."""
    comm.bandwidth = lambda: bandwidth
    net, optimizer = network(), optimizer or SGD(0.05, momentum=0.9)
    net.prepare(5 * comm.size, comm, threads=1)
    random = np.random.default_rng(comm.rank)
    for step in range(steps):
        images = random.standard_normal((5, 1, 28, 28), np.float32)
        net.forward_loss(images, random.integers(0, 10, 5), epoch=step, global_count=5 * comm.size)
        net.backward()
        net.update(optimizer)
    held = sum(len(stage.gradients) for stage in net._overlap.schedule.update)
    arrays = {**net.state_dict(), **optimizer.state_dict(net)}
    digest = hashlib.sha256(b"".join(arrays[name].tobytes() for name in sorted(arrays))).hexdigest()
    assert len(set(comm.allgather_object(digest))) == 1, "ranks hold different weights"
    return digest, held


def main(comm):
    schedule.PIECE = 64 << 10
    schedule.FUSE = 4 << 10
    blocking, _ = train(comm, float("inf"))
    said = comm.start_thread()
    overlapped, none = train(comm, float("inf"))
    slow, held = train(comm, 1e5)
    assert not none and held, (none, held)
    users = comm._comm.Dup()  # another communicator, used by the program around from its own thread
    request = users.Iallreduce(MPI.IN_PLACE, np.ones(3))
    with_user, _ = train(comm, 1e5)
    request.Wait()
    users.Free()
    if comm.rank == 0:
        assert blocking == overlapped == slow == with_user, "the schedule changed the result"
        print(f"same bits on {comm.size} ranks with {said}")


if __name__ == "__main__":
    with communicator.create() as comm, comm.abort_on_error():
        globals()[sys.argv[1] if len(sys.argv) > 1 else "main"](comm)
