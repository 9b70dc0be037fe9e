"""Exchanges in two levels on pretended nodes, for tests/test_hierarchy.py; `two_levels.py NODES...`, such as 3+1."""

import hashlib
import os
import sys

import collectives
import numpy as np

from pcldnn import SGD, Conv2d, Flatten, Linear, MaxPool2d, Network, ReLU, communicator, schedule
from pcldnn.grid import image_shares
from pcldnn.partition import Partition, bounds
from pcldnn.serial import SerialCommunicator

IMAGES = 3  # of each rank in a step
MIXED = {"classifier.0": 2, "classifier.2": 1}  # data groups, where they divide the ranks


def volumes(comm):
    """Every byte crosses the network once a node, and inside a node nothing is sent."""
    shares = [1000 + 7 * rank if rank != 1 else 0 for rank in range(comm.size)]
    members = comm._nodes.members
    owned = [sum(shares[rank] for rank in ranks) for ranks in members]
    wanted = {
        "reduce_scatter": [sum(shares) - own for own in owned],
        "allgather": [own * (len(members) - 1) for own in owned],
    }
    node_of = {rank: node for node, ranks in enumerate(members) for rank in ranks}
    send = comm._messages.send
    for buffer in (comm.allocate(sum(shares)), np.zeros(sum(shares), np.float32), np.zeros(sum(shares))):
        for name, sizes in wanted.items():
            sent = np.zeros(len(members), np.int64)

            def count(array, peer, sent=sent):
                assert node_of[peer] != comm.node, f"a message from {comm.rank} to {peer}, on one node"
                sent[comm.node] += array.size
                send(array, peer)

            comm._messages.send = count
            getattr(comm, name)(buffer, shares)
            comm._messages.send = send
            assert comm.allreduce_sum(sent).tolist() == sizes, (name, sent, sizes)


def order_of_sums(comm):
    """Inside a node in the order of ranks, then in the order of nodes; the same in pieces."""
    shares = [301, 0, 5, 200][: comm.size]
    everyone = [np.random.default_rng(rank).standard_normal(sum(shares), np.float32) for rank in range(comm.size)]
    wanted = in_order(in_order(everyone[rank] for rank in ranks) for ranks in comm._nodes.members)
    own = slice(*bounds(shares, comm.rank))
    for comm.max_count in (100, communicator.MAX_COUNT):
        buffer = comm.allocate(sum(shares))
        buffer[:] = everyone[comm.rank]
        comm.reduce_scatter(buffer, shares)
        assert np.array_equal(buffer[own], wanted[own])


def in_order(arrays):
    total = None
    for array in arrays:
        total = array if total is None else total + array
    return total


def network():
    return Network([Conv2d(1, 6, 3), ReLU(), MaxPool2d(2), Conv2d(6, 11, 3), ReLU(), MaxPool2d(2), Flatten(),
                    Linear(11 * 25, 300), ReLU(), Linear(300, 10)], (1, 28, 28), seed=3)  # fmt: skip


def trained(comm, ranks, steps=4, **options):
    """Weights and momentum after some steps with the minibatch of `ranks` ranks."""
    comm.bandwidth = lambda: 1e5  # slow: some exchanges are held back
    net, optimizer = network(), SGD(0.05, momentum=0.9)
    count = IMAGES * ranks
    net.prepare(count, comm, threads=1, **options)
    random = np.random.default_rng(0)
    own = slice(0, count) if comm.size == 1 else slice(*bounds(image_shares(count, ranks, options.get("exact", 0)), comm.rank))
    for step in range(steps):
        images, labels = random.standard_normal((count, 1, 28, 28), np.float32), random.integers(0, 10, count)
        net.forward_loss(images[own], labels[own], epoch=step, global_count=count)
        net.backward()
        net.update(optimizer)
    return {**net.state_dict(), **optimizer.state_dict(net)}


def digest(arrays):
    return hashlib.sha256(b"".join(arrays[name].tobytes() for name in sorted(arrays))).hexdigest()


def training(comm):
    """What one rank learns; in exact mode the same bits, wherever the ranks are."""
    alone = trained(SerialCommunicator(), comm.size)
    mixed = {name: Partition(groups, comm.size // groups) for name, groups in MIXED.items() if comm.size % groups == 0}
    for partitions in ({"fc": Partition(comm.size)}, mixed):
        found = trained(comm, comm.size, partitions=partitions)
        for name, values in alone.items():
            scale = np.abs(values).max()
            assert np.abs(found[name] - values).max() <= 2e-5 * scale, (name, np.abs(found[name] - values).max(), scale)
        exact = trained(comm, comm.size, partitions=partitions, exact=4)
        assert digest(exact) == digest(trained(SerialCommunicator(), comm.size, exact=4))


def without_memory(layout):
    """One rank cannot make memory that others map, from the start or later: all send messages, and say so."""
    make, last = os.memfd_create, communicator.create().size - 1

    def fail(*arguments):
        raise OSError("no more")

    with communicator.create() as comm:
        if comm.rank == last:
            os.memfd_create = fail
        late = comm.allocate(10)
        assert "no more shared memory" in comm.transport, comm.transport
        comm.reduce_scatter(late, [10] + [0] * last)
        with communicator.create() as other:
            assert other.transport.startswith(f"messages of {other.library} (no shared memory"), other.transport
            assert collectives.adjoint(other, [10] * other.size, np.ones(10 * other.size), 10 * comm.rank, 10 * comm.rank + 10)
    os.memfd_create = make


def main(layouts):
    schedule.PIECE, schedule.FUSE, collectives.EXAMPLES = 64 << 10, 4 << 10, 15
    for layout in layouts:
        os.environ["PCLDNN_NODES"] = layout
        with communicator.create() as comm:
            counts = [int(count) for count in layout.split("+")]
            assert [len(ranks) for ranks in comm._nodes.members] == counts
            assert comm.transport.startswith(f"shared memory inside each of {len(counts)} nodes"), comm.transport
            volumes(comm)
            order_of_sums(comm)
            comm.start_thread()
            collectives.main(comm)
            training(comm)
    without_memory(layouts[0])


if __name__ == "__main__":
    with communicator.create() as everyone, everyone.abort_on_error():
        main(sys.argv[1:])
