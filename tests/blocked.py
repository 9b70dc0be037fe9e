"""Logical arrays to channel blocks and back for the kernel tests, in plain NumPy and independent of pcldnn.layout."""

import numpy as np


def blocks(channels, b):
    """Number of blocks of b channels."""
    return -(-channels // b)


def block(x, b):
    """(N, C, H, W) -> (N, CB, H, W, b), zeros in the lanes beyond C."""
    n, c, h, w = x.shape
    padded = np.zeros((n, blocks(c, b) * b, h, w), x.dtype)
    padded[:, :c] = x
    return np.ascontiguousarray(padded.reshape(n, blocks(c, b), b, h, w).transpose(0, 1, 3, 4, 2))


def unblock(y, channels):
    """(N, CB, H, W, b) -> (N, C, H, W)."""
    n, cb, h, w, b = y.shape
    return y.transpose(0, 1, 4, 2, 3).reshape(n, cb * b, h, w)[:, :channels]


def block_filter(weight, bc, b):
    """(K, C, R, S) -> (KB, CB, R, S, bc, b)."""
    k, c, r, s = weight.shape
    padded = np.zeros((blocks(k, b) * b, blocks(c, bc) * bc, r, s), weight.dtype)
    padded[:k, :c] = weight
    return np.ascontiguousarray(padded.reshape(blocks(k, b), b, blocks(c, bc), bc, r, s).transpose(0, 2, 4, 5, 3, 1))


def unblock_filter(weight, k, c):
    """(KB, CB, R, S, bc, b) -> (K, C, R, S)."""
    kb, cb, r, s, bc, b = weight.shape
    return weight.transpose(0, 5, 1, 4, 2, 3).reshape(kb * b, cb * bc, r, s)[:k, :c]


def block_vector(bias, b):
    """(K,) -> (KB*b,)."""
    padded = np.zeros(blocks(len(bias), b) * b, bias.dtype)
    padded[: len(bias)] = bias
    return padded


def padding_lanes(y, channels):
    """What a blocked array (N, CB, H, W, b) holds in the lanes beyond its channels: to be all zeros."""
    return unblock(y, y.shape[1] * y.shape[4])[:, channels:]


class Arena:
    """Hands out arrays that lie between guards of NaN, at the worst alignment a float can have.

    A kernel that reads beyond its input gets NaN in its result; one that writes beyond its output is found by
    `check`. Outputs are handed out full of NaN, so that nothing left unwritten or added to unnoticed can pass
    for a result.
    """

    GUARD = 33  # [elements]; odd: no alignment beyond that of the element

    def __init__(self):
        self.buffers = []

    def put(self, array):
        """A copy of an array (C-contiguous, same dtype)."""
        copy = self._place(array.shape, array.dtype)
        copy[...] = array
        return copy

    def out(self, *shape, dtype=np.float32):
        """An array to be written, full of NaN."""
        return self._place(shape, np.dtype(dtype))

    def _place(self, shape, dtype):
        size = int(np.prod(shape))
        buffer = np.full(size + 2 * self.GUARD, self._unset(dtype), dtype)
        self.buffers.append((buffer, size))
        return buffer[self.GUARD : self.GUARD + size].reshape(shape)

    def check(self):
        """Refuse if a guard was written to."""
        for buffer, size in self.buffers:
            for guard in (buffer[: self.GUARD], buffer[self.GUARD + size :]):
                unset = self._unset(buffer.dtype)
                intact = np.isnan(guard) if np.isnan(unset) else guard == unset
                assert intact.all(), "a kernel wrote beyond the end of an array"

    @staticmethod
    def _unset(dtype):
        return np.nan if dtype.kind == "f" else np.iinfo(dtype).min
