#!/usr/bin/env python
"""Train VGG-A, alone or on any number of ranks: mpirun -n 2 python scripts/train_vgg.py"""
import sys

from pcldnn.communicator import guard_imports

with guard_imports():
    from pcldnn import models
    from pcldnn.arguments import Job
    from pcldnn.script import main

JOB = Job(
    title="VGG-A",
    about="Train VGG-A (Simonyan and Zisserman 2015, configuration A) by synchronous SGD on any number of MPI ranks. "
          "The input size and the number of classes follow from the data.\n\n"
          "Without --data it trains on 4,000 handwritten digits that come with pcldnn and validates on 1,000 others: a "
          "few minutes on two cores. For a folder of images the defaults are those of the VGG paper, section 3.1: "
          "minibatch 256, learning rate 0.01, momentum 0.9, weight decay 0.0005, 74 epochs.",
    build=lambda classes, shape, dropout, seed: models.vgg_a(classes, shape, dropout, seed),
    synthetic_shape=lambda size: (3, size, size),
    image_size=224,
    classes=1000,
    defaults={"minibatch": 256, "epochs": 74, "lr": 0.01, "lr_schedule": "step", "lr_every": 20.0, "momentum": 0.9,
              "weight_decay": 5e-4, "dropout": 0.5},
    digits={"minibatch": 64, "epochs": 8, "lr": 0.01, "lr_schedule": "poly", "lr_warmup": 1.0},
)

if __name__ == "__main__":
    sys.exit(main(JOB))
