"""Runs with a timeline, for tests/test_trace.py: `traced_runs.py CASE FILE`."""

import sys

import numpy as np

from pcldnn import SGD, Flatten, Linear, Network, ReLU, Trainer, communicator
from pcldnn.data import ArrayDataset


def run(comm, path, steps=3, **options):
    random = np.random.default_rng(0)
    data = ArrayDataset(random.standard_normal((40, 1, 8, 8), np.float32), random.integers(0, 3, 40), num_classes=3)
    layers = [Flatten(), Linear(64, 300), ReLU(), Linear(300, 3)]
    optimizer = SGD(options.pop("lr", 0.01), momentum=0.9)
    trainer = Trainer(Network(layers, (1, 8, 8)), optimizer, comm, threads=1)
    return trainer.fit(data, minibatch=8, epochs=3, steps=steps, trace=path, progress_bar=False, **options)


def trained(comm, path):
    run(comm, path, profile=True)


def no_steps(comm, path):
    run(comm, path, steps=0, profile=True)


def failed(comm, path):
    def callback(record):
        if comm.rank == comm.size - 1 and record.get("step") == 2:
            raise ValueError("boom")

    run(comm, path, callback=callback)


def diverged(comm, path):
    run(comm, path, steps=15, lr=1e30)


if __name__ == "__main__":
    with communicator.create() as comm, comm.abort_on_error():
        globals()[sys.argv[1]](comm, sys.argv[2])
