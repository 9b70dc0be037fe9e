"""The weight arrays of layers: logical for users, blocked for kernels, and how they start."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod, sqrt

import numpy as np

from pcldnn.layout import bias_from_blocked, bias_to_blocked


@dataclass(frozen=True)
class Parameter:
    """A weight array of a layer: its logical shape for users, the shape of its blocked array for kernels.

    Subclasses convert values between the two with `to_blocked` and `from_blocked`.
    """

    name: str  # "weight" or "bias", as PyTorch has it
    shape: tuple[int, ...]
    array_shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """Numbers, logical."""
        return prod(self.shape)

    @property
    def array_size(self) -> int:
        """Numbers in memory, padded lanes included."""
        return prod(self.array_shape)

    @property
    def fan_in(self) -> int:
        """Inputs that add up to one output (`shape` is (out, in, ...))."""
        return prod(self.shape[1:])

    @property
    def fan_out(self) -> int:
        """Outputs that one input adds to."""
        return self.shape[0] * prod(self.shape[2:])

    def part(self, outputs: int, output_blocks: int, of_blocks: int) -> Parameter:
        """That of `outputs` outputs, in `output_blocks` of the `of_blocks` blocks of outputs that there are."""
        rows = self.array_shape[0] // of_blocks * output_blocks
        return replace(self, shape=(outputs, *self.shape[1:]), array_shape=(rows, *self.array_shape[1:]))

    def to_blocked(self, logical: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def from_blocked(self, blocked: np.ndarray) -> np.ndarray:
        raise NotImplementedError


@dataclass(frozen=True)
class Bias(Parameter):
    """One number an output channel; zero at the start."""

    block: int

    @classmethod
    def of(cls, channels: int, block: int) -> Bias:
        return cls("bias", (channels,), (-(-channels // block) * block,), block)

    def to_blocked(self, logical):
        return bias_to_blocked(logical, self.block)

    def from_blocked(self, blocked):
        return bias_from_blocked(blocked, self.shape[0])


def glorot_std(fan_in: int, fan_out: int) -> float:
    """Standard deviation that keeps variance in both directions [Glorot and Bengio 2010, equation 16]."""
    return sqrt(2 / (fan_in + fan_out))


def draw_parameters(parameters: tuple[Parameter, ...], weight_std, seed: int, index: int) -> dict[str, np.ndarray]:
    """Starting values, logical: weights normal with `weight_std(fan_in, fan_out)`, biases zero.

    Drawn from Philox keyed by (seed, index of the layer in its network), in logical order: the same for every rank,
    SIMD width and partition, and for a layer whatever the other layers are.
    """
    random = np.random.Generator(np.random.Philox(key=[seed, index]))
    values = {}
    for parameter in parameters:
        if isinstance(parameter, Bias):
            values[parameter.name] = np.zeros(parameter.shape, np.float32)
        else:
            value = random.standard_normal(parameter.shape, np.float32)
            value *= np.float32(weight_std(parameter.fan_in, parameter.fan_out))
            values[parameter.name] = value
    return values
