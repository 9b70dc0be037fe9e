"""A training script like those in scripts/, for a network that takes no time."""
import math
import sys

from pcldnn import models
from pcldnn.arguments import Job
from pcldnn.script import main

JOB = Job(
    title="small", about="For tests.", image_size=None, classes=5, synthetic_shape=lambda size: (12,),
    build=lambda classes, shape, dropout, seed: models.cd_dnn(math.prod(shape), (16, 16), classes, seed),
    defaults={"minibatch": 1024, "epochs": 20, "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0},
)

if __name__ == "__main__":
    sys.exit(main(JOB))
