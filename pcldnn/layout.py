"""How arrays lie in memory, and the conversions at the two edges of a network.

Inside a network activations are `(N, C/b, H, W, b)` and filters `(K/b, C/b, R, S, b, b)` (input channel, then
output channel innermost), b being the SIMD width [Das et al. 2016, section "data layout"]. A channel count that
does not divide by b is rounded up; the lanes added this way hold zero and stay zero. `Layout` is the one place
that knows both the logical shape, which users see, and the shape of the array, which kernels see.

Parameters are converted here by plain NumPy: that happens when weights are drawn, loaded or saved, never in a step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import numpy as np

from pcldnn import _kernels as kernels

FLOAT = 4  # [byte]
ALIGNMENT = 64  # [byte] a cache line of every CPU we build for; also the width of the widest vector
UNPADDED_CHANNELS = 4  # an image with at most so many channels enters the network without padded lanes


def blocks(count: int, block: int) -> int:
    """Number of blocks of `block` lanes that hold `count` channels."""
    return -(-count // block)


@dataclass(frozen=True)
class Layout:
    """Shape of the activations between two layers, without the number of images.

    Parameters
    ----------
    shape : (C, H, W)
        Logical channels, height and width. A vector of F features is (F, 1, 1).
    block : int
        Lanes of a channel block: the SIMD width, or C itself for a network input that is not padded.
    flat : bool
        The user sees `(N, C*H*W)` instead of `(N, C, H, W)`. The memory is the same for both.
    """

    shape: tuple[int, int, int]
    block: int
    flat: bool = False

    @classmethod
    def vector(cls, features: int, block: int) -> Layout:
        """Layout of `features` numbers an image."""
        return cls((features, 1, 1), block, flat=True)

    @property
    def channels(self) -> int:
        return self.shape[0]

    @property
    def channel_blocks(self) -> int:
        return blocks(self.shape[0], self.block)

    @property
    def logical_shape(self) -> tuple[int, ...]:
        """What users see of one image: (C, H, W), or (C*H*W,) when flat."""
        return (self.features,) if self.flat else self.shape

    @property
    def features(self) -> int:
        """Numbers an image, logical."""
        return prod(self.shape)

    @property
    def padded_features(self) -> int:
        """Numbers an image in memory, padded lanes included."""
        return self.channel_blocks * self.block_features

    @property
    def block_features(self) -> int:
        """Numbers of one channel block of an image."""
        _, height, width = self.shape
        return height * width * self.block

    def array_shape(self, images: int) -> tuple[int, int, int, int, int]:
        """Shape (N, C/b, H, W, b) of the array that holds `images` images."""
        _, height, width = self.shape
        return (images, self.channel_blocks, height, width, self.block)

    def array_bytes(self, images: int) -> int:
        """Size [byte] of that array."""
        return FLOAT * images * self.padded_features

    def flattened(self) -> Layout:
        """The same memory, seen as one vector an image."""
        return replace(self, flat=True)


def aligned_zeros(shape: int | tuple[int, ...]) -> np.ndarray:
    """A float32 array of zeros that starts on a cache line (NumPy alone promises 16 bytes only)."""
    size = FLOAT * (prod(shape) if isinstance(shape, tuple) else shape)
    memory = np.zeros(size + ALIGNMENT, np.uint8)  # zero pages of the system: nothing is touched yet
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(np.float32).reshape(shape)


# --- the edges: what users hand in and get back -----------------------------------------------------------------


def as_float32(array, name: str, shape: tuple[int | None, ...]) -> np.ndarray:
    """Check an array that a user handed in; return it as float32, with whatever strides it has.

    Types whose values float32 holds exactly (bool, 8- and 16-bit integers, float16) are converted. Others (float64,
    int32, ...) are refused rather than rounded in silence. `shape` may hold None where any size is right.
    """
    array = np.asarray(array)
    if not np.can_cast(array.dtype, np.float32, "safe"):
        raise ValueError(
            f"{name}: got dtype {array.dtype}, wanted float32 (or a type that float32 holds exactly: bool, int8, "
            f"uint8, int16, uint16, float16); convert with .astype(numpy.float32) if rounding is meant"
        )
    fits = array.ndim == len(shape) and all(want in (None, got) for got, want in zip(array.shape, shape))
    if not fits:
        wanted = "(" + ", ".join("any" if size is None else str(size) for size in shape) + ")"
        raise ValueError(f"{name}: got shape {array.shape}, wanted {wanted}")
    return array if array.dtype == np.float32 else array.astype(np.float32)


def as_integers(array, name: str, count: int) -> np.ndarray:
    """Check `count` integers (labels, sample ids) that a user handed in; return them as contiguous int64."""
    array = np.asarray(array)
    if array.size == 0:
        array = array.astype(np.int64)  # an empty list arrives as float64
    if not np.can_cast(array.dtype, np.int64, "safe") or array.dtype == bool:
        raise ValueError(f"{name}: got dtype {array.dtype}, wanted integers")
    if array.shape != (count,):
        raise ValueError(f"{name}: got shape {array.shape}, wanted ({count},), one an image")
    return np.ascontiguousarray(array, np.int64)


def block(images: np.ndarray, layout: Layout, out: np.ndarray | None = None, num_threads: int = 1) -> np.ndarray:
    """Blocked copy of logical float32 images, `(N, C, H, W)` or `(N, F)`, of any strides."""
    if out is None:
        out = aligned_zeros(layout.array_shape(len(images)))
    # A vector of features keeps C, H, W in its layout: splitting the last axis is a view for any strides.
    images = images.reshape((len(images), *layout.shape)) if layout.flat else images
    kernels.block_activations(images, out, num_threads)
    return out


def unblock(array: np.ndarray, layout: Layout, num_threads: int = 1) -> np.ndarray:
    """Logical copy, `(N, C, H, W)` or `(N, F)` and contiguous, of blocked activations."""
    images = np.empty((len(array), *layout.shape), np.float32)
    kernels.unblock_activations(array, images, num_threads)
    return images.reshape((len(array), *layout.logical_shape))


# --- parameters -------------------------------------------------------------------------------------------------


def filter_to_blocked(weight: np.ndarray, input_block: int, b: int) -> np.ndarray:
    """Filters `(K, C, R, S)` to `(K/b, C/bc, R, S, bc, b)`, bc being the input's block."""
    out_channels, in_channels, height, width = weight.shape
    out_blocks, in_blocks = blocks(out_channels, b), blocks(in_channels, input_block)
    padded = np.zeros((out_blocks * b, in_blocks * input_block, height, width), weight.dtype)
    padded[:out_channels, :in_channels] = weight
    split = padded.reshape(out_blocks, b, in_blocks, input_block, height, width)
    return np.ascontiguousarray(split.transpose(0, 2, 4, 5, 3, 1))


def filter_from_blocked(blocked: np.ndarray, out_channels: int, in_channels: int) -> np.ndarray:
    """Inverse of `filter_to_blocked`."""
    out_blocks, in_blocks, height, width, input_block, b = blocked.shape
    padded = blocked.transpose(0, 5, 1, 4, 2, 3).reshape(out_blocks * b, in_blocks * input_block, height, width)
    return np.ascontiguousarray(padded[:out_channels, :in_channels])


def linear_to_blocked(weight: np.ndarray, layout: Layout, b: int) -> np.ndarray:
    """Weights `(K, C*H*W)` of a fully connected layer to `(K/b, F, b)`, F being the input's padded features.

    The columns of `weight` are in (C, H, W) order, as every other framework has them after its flatten; ours go
    through the same permutation as the activations do. A fully connected layer is a convolution whose filter is as
    large as the image, so the filters' conversion serves.
    """
    blocked = filter_to_blocked(weight.reshape(-1, *layout.shape), layout.block, b)
    return blocked.reshape(len(blocked), layout.padded_features, b)


def linear_from_blocked(blocked: np.ndarray, layout: Layout, out_features: int) -> np.ndarray:
    """Inverse of `linear_to_blocked`."""
    out_blocks, _, b = blocked.shape
    filters = blocked.reshape(out_blocks, *layout.array_shape(1)[1:], b)
    return filter_from_blocked(filters, out_features, layout.channels).reshape(out_features, layout.features)


def bias_to_blocked(bias: np.ndarray, b: int) -> np.ndarray:
    """One number an output channel, `(K,)`, padded with zeros to a multiple of b."""
    padded = np.zeros(blocks(len(bias), b) * b, bias.dtype)
    padded[: len(bias)] = bias
    return padded


def bias_from_blocked(blocked: np.ndarray, out_channels: int) -> np.ndarray:
    """Inverse of `bias_to_blocked`."""
    return blocked[:out_channels].copy()
