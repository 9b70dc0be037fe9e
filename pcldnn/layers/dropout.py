"""Dropout."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pcldnn import _kernels as kernels
from pcldnn.layers.base import Layer, by_channel_block


@dataclass(frozen=True)
class Dropout(Layer):
    """Zeroes each number with probability p in training and scales the others by 1/(1-p); does nothing otherwise.

    What is zeroed depends on (seed, layer, epoch, sample, unit) alone (counter-based Philox), hence not on the number
    of ranks, the SIMD width or the threads, and no mask is stored: the gradient draws the same numbers again.
    """

    p: float = 0.5

    aliasing = "in_place"

    def __post_init__(self):
        if not 0 <= self.p < 1:
            raise ValueError(f"Dropout p: got {self.p}, wanted 0 <= p < 1")

    @property
    def spread(self):
        return 1 / (1 - self.p)

    def compute_forward(self, unit, x, y, step):
        if step.training:
            self._drop(unit, x, y)
        elif x.ctypes.data != y.ctypes.data:
            np.copyto(y, x)

    def compute_input_grad(self, unit, dy, dx):
        self._drop(unit, dy, dx)

    def _drop(self, unit, source, target):
        step = unit.step
        kernels.dropout(
            by_channel_block(source), by_channel_block(target), self.p, step.seed, unit.plan.index, step.epoch,
            step.sample_ids, unit.plan.input.channels, unit.num_threads,
        )  # fmt: skip

    def __str__(self) -> str:
        return f"Dropout {self.p:g}"
