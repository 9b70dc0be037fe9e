#!/usr/bin/env python
"""Train a CD-DNN for speech: mpirun -n 2 python scripts/train_cddnn.py --synthetic --minibatch 1024 --steps 20"""
import math
import sys

from pcldnn.communicator import guard_imports

with guard_imports():
    from pcldnn import models
    from pcldnn.arguments import Job
    from pcldnn.script import main

JOB = Job(
    title="CD-DNN",
    about="Train a context-dependent deep neural network for speech: frames of features to scores of tied triphone "
          "states through seven fully connected layers of 2048 sigmoid units, by synchronous SGD on any number of MPI "
          "ranks. An image is a frame with its context here.\n\n"
          "--data FILE is an .npz with images (frames x features, float32) and labels; the numbers of features and of "
          "states follow from it. Made-up data have 429 features and 9304 states (Seide et al. 2014).",
    build=lambda classes, shape, dropout, seed: models.cd_dnn(math.prod(shape), classes=classes, seed=seed),
    synthetic_shape=lambda size: (429,),
    image_size=None,
    classes=9304,
    defaults={"minibatch": 1024, "epochs": 20, "lr": 0.1, "lr_schedule": "step", "lr_every": 5.0, "lr_factor": 0.5,
              "momentum": 0.9, "weight_decay": 0.0},
)

if __name__ == "__main__":
    sys.exit(main(JOB))
