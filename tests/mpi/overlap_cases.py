"""Trainings with and without the communication thread, for tests/test_overlap.py; prints one digest a case."""

import hashlib
import sys

import numpy as np
from mpi4py import MPI

from pcldnn import SGD, Conv2d, Dropout, Flatten, Linear, MaxPool2d, Network, ReLU, communicator, overlap, schedule
from pcldnn.partition import Partition


def network():
    """Small layers at first, one that goes in pieces at the end."""
    return Network([Conv2d(1, 6, 3), ReLU(), MaxPool2d(2), Conv2d(6, 11, 3), ReLU(), MaxPool2d(2), Flatten(),
                    Linear(11 * 25, 500), ReLU(), Dropout(0.5), Linear(500, 10)], (1, 28, 28), seed=3)  # fmt: skip


# What exchanges really take; with `unmeasured` in its place the schedule does not follow it.
measured = overlap.Pace.carried
overlap.Pace.carried = unmeasured = lambda *_: None


def train(comm, bandwidth, steps=5, early=False, **options):
    """Digest of weights and momentum after some steps on made-up images, each rank with its share.

    And the exchanges of gradients that are held back; with `early`, where layers may be updated in backward, how many
    are. A last step is refused: it changes nothing.
    """
    comm.bandwidth = lambda: bandwidth
    net, optimizer = network(), SGD(0.05, momentum=0.9)
    partitions = {name: Partition(data=comm.size) for name in ("classifier.0", "classifier.3")}
    net.prepare(4 * comm.size, comm, threads=1, **{"partitions": partitions, **options})
    random = np.random.default_rng(comm.rank)
    for step in range(steps + 1):
        images = random.standard_normal((4, 1, 28, 28), np.float32)
        net.forward_loss(images, random.integers(0, 10, 4), epoch=step, global_count=4 * comm.size)
        control = net.start_sum(np.array([step == steps], np.int64), refuses=lambda total: total[0] > 0)
        net.backward(optimizer if early else None)
        assert control()[0] == (comm.size if step == steps else 0)
        if step < steps:
            net.update(optimizer)
    held = sum(len(stage.gradients) for stage in net._passes.overlap.schedule.update)
    updated = sum(len(stage.layers) for stage in net._passes.overlap.schedule.backward.values())
    assert early or not updated, updated
    return digest_of(net, optimizer, comm), updated if early else held


def digest_of(net, optimizer, comm):
    """Of weights and momentum, which all ranks must have alike."""
    arrays = {**net.state_dict(), **optimizer.state_dict(net)}
    digest = hashlib.sha256(b"".join(arrays[name].tobytes() for name in sorted(arrays))).hexdigest()
    assert len(set(comm.allgather_object(digest))) == 1, "ranks hold different weights"
    return digest


def followed(comm):
    """Ranks measure unlike rates, all follow rank 0's, and the new schedule changes no bit."""
    comm.start_thread()
    steps = overlap.FIRST + 3
    wanted = train(comm, 1e12, steps, early=True)
    for rate in (1e5, 1e15):
        overlap.Pace.carried = lambda pace, size, _, rate=rate: measured(pace, size, size / (rate * (1 + comm.rank)))
        got = train(comm, 1e12, steps, early=True)
        assert got[0] == wanted[0] and len(set(comm.allgather_object(got))) == 1, rate
        assert (got[1] != wanted[1]) == (rate == 1e5), "the schedule did not follow rank 0's rate"
    overlap.Pace.carried = unmeasured
    if comm.rank == 0:
        print("same bits whatever was measured")


def refused(comm):
    """A refused step changes nothing, and neither does what is left of it in the next one, which cannot be refused."""
    comm.start_thread()
    comm.bandwidth = lambda: 1e12

    def run(steps, early):
        net, optimizer = network(), SGD(0.05, momentum=0.9)
        net.prepare(4 * comm.size, comm, threads=1, partitions={"fc": Partition(data=comm.size)})
        for step, kind in steps:
            random = np.random.default_rng((step, comm.rank))
            images = random.standard_normal((4, 1, 28, 28), np.float32)
            net.forward_loss(images, random.integers(0, 10, 4), epoch=step, global_count=4 * comm.size)
            if kind != "no sum":
                net.start_sum(np.ones(1), refuses=(lambda total: total[0] > 0) if kind == "refused" else None)
            net.backward(optimizer if early else None)
            if kind != "refused":
                net.update(optimizer)
        return digest_of(net, optimizer, comm)

    steps = [(0, "no sum"), (1, "refused"), (2, "no sum"), (3, "refused"), (4, "sum")]
    accepted = [step for step in steps if step[1] != "refused"]
    wanted = run(accepted, False)
    assert wanted != run(accepted[:-1], False)
    for early in (False, True):
        assert run(accepted, early) == run(steps, early) == wanted, early
    if comm.rank == 0:
        print("same bits without the refused steps")


def grids(comm):
    """Hybrid layers on a grid, and exact mode, with and without the thread."""
    schedule.PIECE, schedule.FUSE = 64 << 10, 4 << 10
    data = comm.size // 2 or 1
    half, whole = Partition(data, comm.size // data), Partition(1, comm.size)
    options = [{"partitions": {"classifier.0": half, "conv2": whole}}, {"exact": 4},
               {"partitions": {"classifier.0": whole, "conv2": half}, "exact": 4}]  # fmt: skip
    rates = (float("inf"), True), (1e5, False)
    blocking = [train(comm, float("inf"), **option)[0] for option in options]
    comm.start_thread()
    for option, wanted in zip(options, blocking):
        got = [train(comm, rate, early=early, **option)[0] for rate, early in rates]
        assert got == [wanted] * 2, option
    assert blocking[1] == blocking[2], "exact mode depends on the partition"
    if comm.rank == 0:
        print("same bits on grids")


def unclosed(comm):
    """A17: the program ends with exchanges under way and nobody closes anything."""
    comm.start_thread()
    for _ in range(20):
        buffer = np.zeros(100_000 * comm.size, np.float32)
        comm.start("allgather", comm.allgather, buffer, [100_000] * comm.size)
    print("end of the program")


def main(comm):
    schedule.PIECE = 64 << 10
    schedule.FUSE = 4 << 10
    blocking, _ = train(comm, float("inf"))
    said = comm.start_thread()
    overlapped, none = train(comm, float("inf"))
    slow, held = train(comm, 1e5)
    early, in_backward = train(comm, 1e12, early=True)
    assert in_backward, "no layer was updated in backward"
    assert not none and held, (none, held)
    users = comm._comm.Dup()  # another communicator, used by the program around from its own thread
    request = users.Iallreduce(MPI.IN_PLACE, np.ones(3))
    with_user, _ = train(comm, 1e5)
    request.Wait()
    users.Free()
    if comm.rank == 0:
        assert blocking == overlapped == slow == early == with_user, "the schedule changed the result"
        print(f"same bits on {comm.size} ranks with {said}")


if __name__ == "__main__":
    if sys.argv[1:] == ["unclosed"]:
        unclosed(communicator.create())
        sys.exit()
    with communicator.create() as comm, comm.abort_on_error():
        globals()[sys.argv[1] if len(sys.argv) > 1 else "main"](comm)
