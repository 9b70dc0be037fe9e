"""The embedded data set: 5,000 handwritten digits of MNIST (origin and licence in digits.README.md)."""

import os
from functools import lru_cache

import numpy as np

from pcldnn.data.arrays import ArrayDataset
from pcldnn.data.augment import Augment
from pcldnn.data.dataset import mean_std

PATH = os.path.join(os.path.dirname(__file__), "digits.npz")
SHIFT = 2  # [pixel] in training; MNIST's digits leave 4 pixels free on every side, 6 after padding


class Digits(ArrayDataset):
    """Digits padded with zeros from 28x28 to 32x32: 4,000 to train on (400 a class) or 1,000 to test on
    (100 a class).

    Parameters
    ----------
    split : str
        "train" or "test"; a fixed split, the same everywhere.
    augment : Augment, optional
        Default: a random shift by up to 2 pixels in training, mean and deviation of the training set; no
        mirror.
    """

    def __init__(self, split="train", augment=None):
        if split not in ("train", "test"):
            raise ValueError(f"split: got {split!r}, wanted 'train' or 'test'")
        images, labels = _arrays(split)
        if augment is None:
            mean, std = _statistics()
            augment = Augment((32, 32), shift=SHIFT, mean=mean, std=std)
        super().__init__(images, labels, num_classes=10, augment=augment, name=f"digits ({split})")


@lru_cache
def _arrays(split):
    with np.load(PATH, allow_pickle=False) as arrays:
        images, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"]
    images = np.pad(images, ((0, 0), (2, 2), (2, 2)))
    images.setflags(write=False)  # shared by every Digits of the process
    return images, labels


@lru_cache
def _statistics():
    return mean_std(ArrayDataset(*_arrays("train"), augment=Augment((32, 32))))
