"""Prints a digest of all passes of layers of many shapes: what both kinds of micro-kernel have to agree on.

    python tests/tile_bits.py
"""

import hashlib

import numpy as np

from pcldnn import Conv2d, Linear


def layers(random):
    """(layer, shape of x): convolutions with every width, number of vectors and cut of a tile, and fully connected."""
    for _ in range(150):
        kernel, stride, padding = random.choice([1, 2, 3, 5, 7]), random.integers(1, 4), random.integers(0, 4)
        channels, outputs = random.choice([1, 3, 8, 20, 40]), random.choice([5, 16, 33, 64, 80])
        height, width = random.integers(kernel, 24, 2)
        layer = Conv2d(int(channels), int(outputs), int(kernel), int(stride), int(min(padding, kernel - 1)))
        yield layer, (random.integers(1, 14), channels, height, width)
    for _ in range(50):
        features, outputs = random.integers(1, 200, 2)
        yield Linear(int(features), int(outputs)), (random.integers(1, 80), features)


def main():
    random = np.random.default_rng(0)
    digest = hashlib.sha256()
    for layer, shape in layers(random):
        layer.initialize(seed=1)
        y = layer.forward(random.standard_normal(shape, dtype=np.float32))
        dy = random.standard_normal(y.shape, dtype=np.float32)
        gradients = layer.weight_grad(dy)
        for array in (y, *(gradients[name] for name in sorted(gradients)), layer.input_grad(dy)):
            digest.update(np.ascontiguousarray(array))
    print(digest.hexdigest())


if __name__ == "__main__":
    main()
