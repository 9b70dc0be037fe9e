"""Trainings for tests/test_train.py: ``train_cases.py FOLDER CASE...`` under mpirun.

Each case is a function of (communicator, folder) that returns what the test wants to know, or never returns.
"""
import os
import signal
import sys
import time

import numpy as np
import small_runs
from small_runs import at_step_3, divergence, main, optimizer, some_digits, spoil

from pcldnn import SGD, Conv2d, Dropout, Flatten, Linear, MaxPool2d, Network, ReLU, Trainer
from pcldnn.checkpoint import CheckpointError
from pcldnn.data import ArrayDataset, DataError, open_dataset
from pcldnn.faults import CollectiveError


def network(width=24, seed=1):
    """Convolutions, pooling, dropout; sizes that divide by nothing."""
    return Network([Conv2d(1, 6, 5, stride=2, padding=2), ReLU(), MaxPool2d(2), Conv2d(6, 11, 3), ReLU(), MaxPool2d(2),
                    Flatten(), Linear(11 * 3 * 3, width), ReLU(), Dropout(0.5), Linear(width, 10)], (1, 32, 32),
                   seed=seed)


def fit(comm, net, data, validation=None, **options):
    """Train quietly; returns what is to be compared."""
    return small_runs.fit(Trainer(net, optimizer(), comm, threads=1), data, validation, **{"minibatch": 100, **options})


def curve(comm, folder):
    """20 steps on digits with shuffle, shifts, dropout, momentum, weight decay and a schedule; then an evaluation."""
    train, validation = open_dataset()
    return fit(comm, network(), train, validation, epochs=1, steps=20, checkpoint=folder / "curve.safetensors")


def few(comm, folder):
    """A14: the last minibatch has 2 samples, and the minibatch itself may be smaller than the ranks."""
    return {"minibatch 4": fit(comm, network(), some_digits(10), minibatch=4, epochs=2),
            "minibatch 1": fit(comm, network(), some_digits(3), minibatch=1, epochs=1),
            "minibatch 50": fit(comm, network(), some_digits(3), some_digits(2), minibatch=50, epochs=2)}


def uneven(comm, folder):
    """A15: 3 samples, of which only the last moves the weights: its gradient must count as a third on any ranks."""
    net = Network([Linear(1, 2)], (1,))
    net.load_state_dict({"0.weight": np.zeros((2, 1), np.float32), "0.bias": np.zeros(2, np.float32)})
    data = ArrayDataset(np.array([[0], [0], [6]], np.float32), np.array([0, 0, 0]), num_classes=2)
    Trainer(net, SGD(1.0), comm, 1).fit(data, minibatch=3, verbose=False)
    return net.state_dict()["0.weight"][:, 0].tolist()


def accuracy(comm, folder):
    """A21: ten samples, a network that always says class 0, which is right for the first one only."""
    net = Network([Linear(2, 7)], (2,))
    bias = np.arange(7, 0, -1, dtype=np.float32)
    net.load_state_dict({"0.weight": np.zeros((7, 2), np.float32), "0.bias": bias})
    data = ArrayDataset(np.zeros((10, 2), np.float32), np.array([0, 1, 1, 2, 3, 4, 4, 5, 6, 6]), num_classes=7)
    trainer = Trainer(net, SGD(0.1), comm, 1)
    results = [trainer.evaluate(data, minibatch) for minibatch in (1, 3, 10, 100)]
    return [[result.count, result.correct1, result.correct5] for result in results]


def refusals(comm, folder):
    """A18: what differs between ranks is refused on all of them, and the job goes on."""
    odd = comm.rank == comm.size - 1
    attempts = {
        "width": lambda: fit(comm, network(width=25 if odd else 24), some_digits(10)),
        "data": lambda: fit(comm, network(), some_digits(11 if odd else 10)),
        "minibatch": lambda: fit(comm, network(), some_digits(10), minibatch=5 if odd else 4),
        "seed": lambda: fit(comm, network(seed=2 if odd else 1), some_digits(10)),
        "steps": lambda: fit(comm, network(), some_digits(10), minibatch=4, steps=2 if odd else 1),
        "resume": lambda: fit(comm, network(), some_digits(10), resume=folder / "nowhere.safetensors"),
    }
    messages = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except (CollectiveError, CheckpointError) as error:
            messages[name] = f"{type(error).__name__}: {error}"
    return messages


def diverged(comm, folder):
    """A NaN in one sample of one rank; an infinity in the weights of all."""
    bad = network()
    bad.load_state_dict({**bad.state_dict(), "classifier.0.bias": np.full(24, np.inf, np.float32)})
    return {"sample": divergence(Trainer(network(), optimizer(), comm, threads=1), some_digits(12, spoil)),
            "weights": divergence(Trainer(bad, optimizer(), comm, threads=1), some_digits(12))}


def stop(comm, folder):
    """A19: one rank decides to stop; all do, after the same step, with a checkpoint."""
    net, data = network(), some_digits(10)
    trainer = Trainer(net, optimizer(), comm, threads=1)
    callback = at_step_3(comm, lambda: trainer.request_stop("patience is over"))
    result = trainer.fit(data, data, minibatch=2, epochs=3, verbose=False, callback=callback,
                         checkpoint=folder / "stop.safetensors")
    again = trainer.fit(data, minibatch=2, epochs=1, verbose=False)
    return {"step": result.step, "stopped": result.stopped, "again": again.step}


def resumed(comm, folder):
    """A25: 10 steps against 6 + 4, the interruption inside an epoch of 4 steps."""
    data, validation = some_digits(30), some_digits(7)
    options = {"minibatch": 8, "epochs": 4}
    straight = fit(comm, network(), data, validation, **options, steps=10, checkpoint=folder / "straight.safetensors",
                   metrics=folder / "straight.jsonl")
    first = fit(comm, network(), data, validation, **options, steps=6, checkpoint=folder / "part.safetensors",
                metrics=folder / "part.jsonl")
    comm.barrier()
    kept = folder / "kept.safetensors"      # for a resume on another number of ranks
    if comm.rank == 0:
        kept.write_bytes((folder / "part.safetensors").read_bytes())
    second = fit(comm, network(seed=1), data, validation, **options, steps=10, checkpoint=folder / "part.safetensors",
                 resume=folder / "part.safetensors", metrics=folder / "part.jsonl")
    return {"straight": straight, "first": first, "second": second}


def resumed_elsewhere(comm, folder):
    return fit(comm, network(), some_digits(30), some_digits(7), minibatch=8, epochs=4, steps=10,
               resume=folder / "kept.safetensors")


def full_disk(comm, folder):
    """A24: a checkpoint that does not fit is reported on all ranks and training goes on."""
    return fit(comm, network(), some_digits(10), minibatch=5, epochs=3, checkpoint=folder / "disk" / "c.safetensors",
               metrics=folder / "disk" / "m.jsonl")


# --- cases that end the job -----------------------------------------------------------------------------------------


def _failing(comm, action):
    Trainer(network(), optimizer(), comm, threads=1).fit(some_digits(50), minibatch=10, epochs=50, verbose=False,
                                                         callback=at_step_3(comm, action))


def raises(comm, folder):
    _failing(comm, lambda: 1 / 0)


def exits(comm, folder):
    _failing(comm, lambda: sys.exit(3))


def killed(comm, folder):
    _failing(comm, lambda: os.kill(os.getpid(), signal.SIGKILL))


def damaged(comm, folder):
    """A sample that cannot be read on one rank."""
    class Damaged(ArrayDataset):
        def read(self, index):
            if index == 17:
                raise DataError("the file ends early", "/data/train/3/17.jpg", index)
            return super().read(index)
    good = some_digits(40)
    data = Damaged(good.images, good.labels, num_classes=10)
    Trainer(network(), optimizer(), comm, threads=1).fit(data, minibatch=8, epochs=2, verbose=False)


def slow(comm, folder):
    """Goes on until a signal of the test stops it."""
    trainer = Trainer(network(), optimizer(), comm, threads=1)
    from pcldnn.script import stop_signals

    def callback(record):
        if record.get("step") == 2 and comm.rank == comm.size - 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.01)
    with stop_signals(trainer):
        result = trainer.fit(some_digits(10), minibatch=5, epochs=1000, verbose=False, callback=callback)
    return {"step": result.step, "stopped": result.stopped}


if __name__ == "__main__":
    main(globals())
