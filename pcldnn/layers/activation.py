"""Element-wise non-linear functions.

Each also knows which spread of the weights before it keeps signals alive through a deep network.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from pcldnn import _kernels as kernels
from pcldnn.layers.base import Layer, by_channel_block
from pcldnn.layers.parameter import glorot_std


@dataclass(frozen=True)
class ReLU(Layer):
    """max(0, x). NaN stays NaN."""

    aliasing = "in_place"
    saves = frozenset({"output"})

    def weight_std(self, fan_in, fan_out):
        return sqrt(2 / fan_in)  # He et al. 2015, equation 10: half of the variance is cut off

    def compute_forward(self, unit, x, y, step):
        kernels.relu_forward(x, y, unit.num_threads)

    def compute_input_grad(self, unit, dy, dx):
        kernels.relu_input_grad(unit.y, dy, dx, unit.num_threads)


@dataclass(frozen=True)
class Sigmoid(Layer):
    """1 / (1 + exp(-x))."""

    aliasing = "in_place"
    saves = frozenset({"output"})

    def weight_std(self, fan_in, fan_out):
        return 4 * glorot_std(fan_in, fan_out)  # the slope of the sigmoid at 0 is 1/4

    def compute_forward(self, unit, x, y, step):
        channels = unit.plan.output.channels  # sigmoid(0) is not 0: the kernel must know which lanes are padding
        kernels.sigmoid_forward(by_channel_block(x), by_channel_block(y), channels, unit.num_threads)

    def compute_input_grad(self, unit, dy, dx):
        kernels.sigmoid_input_grad(unit.y, dy, dx, unit.num_threads)


@dataclass(frozen=True)
class Tanh(Layer):
    """Hyperbolic tangent."""

    aliasing = "in_place"
    saves = frozenset({"output"})

    def weight_std(self, fan_in, fan_out):
        return glorot_std(fan_in, fan_out)

    def compute_forward(self, unit, x, y, step):
        kernels.tanh_forward(x, y, unit.num_threads)

    def compute_input_grad(self, unit, dy, dx):
        kernels.tanh_input_grad(unit.y, dy, dx, unit.num_threads)
