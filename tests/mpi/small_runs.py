"""What train_cases.py and grid_cases.py share: a few digits, quiet trainings, and how cases are run."""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

from pcldnn import SGD, StepDecay, communicator
from pcldnn.data import ArrayDataset, open_dataset
from pcldnn.train import TrainingDiverged


def optimizer():
    return SGD(StepDecay(0.02, every=0.3, factor=0.5), momentum=0.9, weight_decay=5e-4)


def some_digits(count, changed=None):
    """A few digits as an array data set; `changed` edits the float32 images."""
    digits, _ = open_dataset()
    chosen = np.arange(count) * (len(digits) // count)
    images = np.stack([digits.read(i) for i in chosen]).astype(np.float32) / 255
    images = np.pad(images, ((0, 0), (0, 0), (2, 2), (2, 2))) if images.shape[-1] == 28 else images
    if changed is not None:
        changed(images)
    return ArrayDataset(images, digits.labels[chosen], num_classes=10)


def spoil(images):
    """A NaN in one sample."""
    images[5, 0, 10, 10] = np.nan


def digest(net):
    return hashlib.sha256(b"".join(array.tobytes() for array in net.state_dict().values())).hexdigest()


def fit(trainer, data, validation=None, **options):
    """Train quietly; returns what is to be compared."""
    result = trainer.fit(data, validation, verbose=False, **options)
    evaluation = result.evaluation and list(vars(result.evaluation).values())
    return {"losses": result.losses, "digest": digest(trainer.network), "evaluation": evaluation, "step": result.step,
            "epoch": result.epoch, "stopped": result.stopped, "checkpoint_error": result.checkpoint_error}  # fmt: skip


def divergence(trainer, data):
    """How a training with something that is not finite ends."""
    before = digest(trainer.network)  # draws the weights, if they are not there
    try:
        fit(trainer, data, minibatch=4)
    except TrainingDiverged as error:
        return {"step": error.step, "culprits": error.culprits, "text": str(error),
                "untouched": digest(trainer.network) == before}  # fmt: skip
    return {}


def at_step_3(comm, action):
    """A callback: the last rank does something after step 3."""

    def callback(record):
        if comm.rank == comm.size - 1 and record.get("step") == 3:
            action()

    return callback


def main(cases):
    """``FOLDER CASE...``: run some of the functions in `cases`; each rank writes FOLDER/CASE-RANK.json."""
    folder = Path(sys.argv[1])
    with communicator.create() as comm, comm.abort_on_error():
        for case in sys.argv[2:]:
            found = cases[case](comm, folder)
            (folder / f"{case}-{comm.rank}.json").write_text(json.dumps(found))
