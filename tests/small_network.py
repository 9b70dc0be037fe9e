"""A small network with a layer of almost every kind, a minibatch for it, and one step."""

import numpy as np

from pcldnn.layers import AvgPool2d, Conv2d, Dropout, Flatten, Linear, MaxPool2d, ReLU, Tanh

SMALL = [
    Conv2d(3, 10, 3, padding=1), ReLU(), MaxPool2d(2), Conv2d(10, 9, 3, padding=1), Tanh(), Dropout(0.3),
    AvgPool2d(2, ceil_mode=True), Flatten(), Linear(36, 17), ReLU(), Dropout(0.5), Linear(17, 5),
]  # fmt: skip
SHAPE = (3, 6, 7)


def batch(images=5, shape=SHAPE, classes=5, seed=0):
    random = np.random.default_rng(seed)
    return random.standard_normal((images, *shape)).astype(np.float32), random.integers(0, classes, images)


def step(network, images, labels, optimizer=None, **options):
    """One step; the sum of the losses, the logits and the gradients."""
    loss, logits = network.forward_loss(images, labels, **options)
    logits = logits.copy()
    network.backward()
    gradients = network.gradients()
    if optimizer:
        network.update(optimizer)
    return loss, logits, gradients
