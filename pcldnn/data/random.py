"""Counter-based random numbers: the order of an epoch and the draws of one sample.

Every number is a pure function of (seed, epoch, sample), never of what was drawn before, so it is the same
on any number of ranks and threads, whatever was prefetched, and after a resume in mid-epoch.

The generator is Philox4x64-10 (Salmon et al. 2011) as `numpy.random.Philox`. Only its raw 64-bit stream is
used: NumPy keeps that stream fixed for ever, while `Generator.permutation` and its like may change between
versions.
"""

import operator

import numpy as np

# Second word of the Philox key: keeps the streams of one seed apart. ASCII of the name, so that it cannot
# meet the small integers (a layer's index) that other parts of pcldnn use there.
ORDER = int.from_bytes(b"order", "big")
AUGMENT = int.from_bytes(b"augment", "big")
SYNTHETIC = int.from_bytes(b"synth", "big")
PATTERN = int.from_bytes(b"pattern", "big")


def raw(seed, stream, epoch, sample, count):
    """`count` random 64-bit words of the stream (seed, stream, epoch, sample).

    Parameters
    ----------
    seed : int
        0 <= seed < 2**64.
    stream : int
        One of the constants of this module.
    epoch, sample : int
        Words of the Philox counter; its lowest word counts the blocks within the stream.
    count : int

    Returns
    -------
    ndarray of uint64, shape (count,)
    """
    key = np.array([check_seed(seed), stream], dtype=np.uint64)
    counter = np.array([0, sample, epoch, 0], dtype=np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)


def uniforms(seed, stream, epoch, sample, count):
    """`count` floats in [0, 1) with 53 random bits each, as a list."""
    return [int(word >> np.uint64(11)) * 2.0**-53 for word in raw(seed, stream, epoch, sample, count)]


def permutation(length, seed, epoch):
    """The order of an epoch: a permutation of range(length) that depends on (length, seed, epoch) alone.

    Sample i gets the i-th 64-bit word of the stream, and samples are sorted by their words (ties by index).

    Returns
    -------
    ndarray of int64, shape (length,)
    """
    words = raw(seed, ORDER, epoch, 0, length)
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


def check_seed(seed):
    """Return `seed` as an int; ValueError unless it is an integer in [0, 2**64)."""
    try:
        value = operator.index(seed)
    except TypeError:
        value = -1
    if not 0 <= value < 2**64:
        raise ValueError(f"seed: got {seed!r}, wanted an integer from 0 to 2**64 - 1")
    return value
