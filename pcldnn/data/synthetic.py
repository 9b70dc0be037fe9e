"""Made-up data for trying and timing networks: no files, any shape, any number of classes."""

import numpy as np

from pcldnn.data.augment import Augment
from pcldnn.data.dataset import Dataset, check_shape, digest
from pcldnn.data.random import PATTERN, SYNTHETIC, check_seed, raw


class Synthetic(Dataset):
    """Noise over a coarse pattern that the class decides, so that a network has something to learn.

    Sample i is a pure function of (seed, i): uint8, half noise, half the pattern of its class, which is i
    modulo the number of classes.

    Parameters
    ----------
    shape : tuple of int
        (C, H, W), or (F,) which is read as (F, 1, 1).
    classes : int
    length : int
    seed : int
    first : int
        Number of the first sample: two sets with the same seed and disjoint ranges share the classes, not
        the noise.
    """

    def __init__(self, shape, classes, length, seed=0, first=0):
        shape = check_shape(shape)
        for name, value in (("classes", classes), ("length", length)):
            if value < 1:
                raise ValueError(f"{name}: got {value}, wanted >= 1")
        self.seed, self.first = check_seed(seed), int(first)
        numbers = np.arange(self.first, self.first + length, dtype=np.int64)
        # The sum of two uniform halves, 0..127 each: mean 127, deviation 127 / sqrt(6).
        augment = Augment(shape[1:], mean=(127.0,), std=(51.8,))
        names = [str(i) for i in range(classes)]
        super().__init__(numbers % classes, names, shape, "synthetic", augment)

    def read(self, index):
        c, h, w = self.sample_shape
        image = self._bytes(SYNTHETIC, self.first + int(index), (c, h, w)) >> 1
        grid = self._bytes(PATTERN, self.label(index), (c, min(h, 4), min(w, 4))) >> 1
        rows = np.arange(h) * grid.shape[1] // h
        columns = np.arange(w) * grid.shape[2] // w
        image += grid[:, rows[:, None], columns]
        return image

    def content(self):
        return digest(
            f"synthetic {self.seed} {self.first} {len(self)} {self.sample_shape} {self.num_classes}"
        )

    def _bytes(self, stream, number, shape):
        count = int(np.prod(shape))
        words = raw(self.seed, stream, 0, number, -(-count // 8)).astype("<u8", copy=False)
        return words.view(np.uint8)[:count].reshape(shape)


def open_synthetic(shape, classes, length=1024, seed=0):
    """(train, validation): `length` samples to train on, a fifth as many others to validate on."""
    train = Synthetic(shape, classes, length, seed)
    return train, Synthetic(shape, classes, max(1, length // 5), seed, first=length)
