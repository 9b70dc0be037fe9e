#!/usr/bin/env python
"""Train OverFeat-FAST: mpirun -n 2 python scripts/train_overfeat.py --synthetic --minibatch 32 --steps 20"""
import sys

from pcldnn.communicator import guard_imports

with guard_imports():
    from pcldnn import models
    from pcldnn.arguments import Job
    from pcldnn.script import main

JOB = Job(
    title="OverFeat-FAST",
    about="Train OverFeat-FAST (Sermanet et al. 2014, in the geometry of convnet-benchmarks) by synchronous SGD on any "
          "number of MPI ranks. The number of classes follows from the data; images are resized to 231x231 unless "
          "--image-size says otherwise (71 at least).\n\n"
          "Minibatch 256 is the one of Das et al. 2016.",
    build=lambda classes, shape, dropout, seed: models.overfeat_fast(classes, shape, dropout, seed),
    synthetic_shape=lambda size: (3, size, size),
    image_size=231,
    classes=1000,
    defaults={"image_size": 231, "minibatch": 256, "epochs": 90, "lr": 0.01, "lr_schedule": "step", "lr_every": 30.0,
              "momentum": 0.9, "weight_decay": 5e-4, "dropout": 0.5},
)

if __name__ == "__main__":
    sys.exit(main(JOB))
