"""A program of your own that uses MPI for its own purposes and trains a network on some of its ranks.

    mpirun -n 3 python docs/examples/user_mpi_program.py

The first two ranks (or all but the last) train; the last one does something else meanwhile. pcldnn works on a duplicate
of the communicator that it is given, so its messages never meet yours.
"""
import numpy as np
from mpi4py import MPI

from pcldnn import SGD, Communicator, Dropout, Linear, Network, ReLU, Trainer
from pcldnn.data import ArrayDataset


def rings(count, seed):
    """Points in the plane; the class is the ring they lie in: a data set of two arrays."""
    random = np.random.default_rng(seed)
    labels = np.arange(count) % 3
    radius, angle = labels + random.uniform(0.1, 0.9, count), random.uniform(0, 2 * np.pi, count)
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).astype(np.float32)
    return ArrayDataset(points, labels, class_names=["inner", "middle", "outer"])


def main():
    world = MPI.COMM_WORLD
    trains = world.rank < max(world.size - 1, 1)
    mine = world.Split(color=trains, key=world.rank)

    if trains:
        network = Network([Linear(2, 64), ReLU(), Linear(64, 64), ReLU(), Dropout(0.1), Linear(64, 3)], (2,), seed=7)
        with Communicator(mine) as communicator:
            trainer = Trainer(network, SGD(lr=0.1, momentum=0.9), communicator)
            result = trainer.fit(rings(600, seed=1), rings(300, seed=2), minibatch=30, epochs=8, verbose=False)
        answer = result.evaluation.top1
    else:
        answer = mine.allreduce(world.rank)     # your own MPI calls go on

    answers = world.gather(answer)
    if world.rank == 0:
        print(f"{mine.size} of {world.size} ranks trained; validation accuracy {100 * answers[0]:.1f} %")
        assert answers[0] > 0.9
    mine.Free()


if __name__ == "__main__":
    main()
