"""One layer used by itself, on logical arrays: what `layer.forward(x)` and its kin do.

A convenience for learning, testing and trying out. It goes the same way as a network does (plan, Unit, kernels), but
converts at both ends of each call and allocates as it goes.
"""

from __future__ import annotations

import numpy as np

from pcldnn import _kernels as kernels
from pcldnn.layers.base import Layer, Memory, StepContext, Unit
from pcldnn.layers.parameter import draw_parameters, glorot_std
from pcldnn.layout import Layout, as_float32, as_integers, block, unblock
from pcldnn.machine import Machine, threads_per_rank


class Lone:
    """State of a layer that is used alone: its parameters and the Unit of its last forward pass."""

    def __init__(self, layer: Layer):
        self.layer = layer
        self.num_threads, _ = threads_per_rank(1)
        self.seed = 0
        self.values: dict[str, np.ndarray] | None = None  # logical
        self.unit: Unit | None = None

    # --- parameters ---

    def parameters(self):
        """Descriptions of the parameters. Their logical side does not depend on the input's size."""
        layer = self.layer
        shape = getattr(layer, "in_channels", None) or getattr(layer, "in_features", None) or 1
        return layer.parameters(Layout.vector(shape, kernels.SIMD_WIDTH), kernels.SIMD_WIDTH)

    def initialize(self, seed):
        self.seed = seed
        self.values = draw_parameters(self.parameters(), glorot_std, seed, 0)

    def state_dict(self):
        if self.values is None:
            self.initialize(self.seed)
        return {name: value.copy() for name, value in self.values.items()}

    def load_state_dict(self, values):
        shapes = {parameter.name: parameter.shape for parameter in self.parameters()}
        if set(values) != set(shapes):
            raise ValueError(f"{self.layer!r}: got parameters {sorted(values)}, wanted {sorted(shapes)}")
        self.values = {name: as_float32(values[name], name, shape).copy() for name, shape in shapes.items()}

    # --- passes ---

    def forward(self, x, training, epoch, sample_ids):
        array = np.asarray(x)
        if array.ndim not in (2, 4):
            raise ValueError(f"x: got shape {array.shape}, wanted (N, C, H, W) or (N, F)")
        x = as_float32(array, "x", array.shape)
        images = len(x)
        ids = np.arange(images) if sample_ids is None else as_integers(sample_ids, "sample_ids", images)
        self.unit = self._unit(x)
        blocked = block(x, self.unit.plan.input, num_threads=self.num_threads)
        if self.layer.aliasing == "view":
            self.unit.memory.output = blocked
        step = StepContext(training, self.seed, epoch, ids)
        y = self.unit.forward(blocked, step)
        return unblock(y, self.unit.plan.output, self.num_threads)

    def weight_grad(self, dy):
        dy = self._gradient(dy)
        if not self.unit.plan.parameters:
            return {}
        self.unit.weight_grad(dy)
        return self.unit.plan.from_flat(self.unit.gradients)

    def input_grad(self, dy):
        dy = self._gradient(dy)
        if self.layer.aliasing == "view":
            self.unit.memory.input_grad = dy
        return unblock(self.unit.input_grad(dy), self.unit.plan.input, self.num_threads)

    def _unit(self, x):
        """A Unit for input like x, with memory of its own and the parameters loaded."""
        machine = Machine.detect()
        b = machine.width  # also for few channels: an unpadded input would have no input gradient
        layout = Layout(x.shape[1:], b) if x.ndim == 4 else Layout.vector(x.shape[1], b)
        plan = self.layer.plan(layout, len(x), machine, self.num_threads)
        memory = Memory.alone(plan, len(x))
        plan.to_flat(self.state_dict(), memory.parameters)
        return Unit(plan, memory, self.num_threads)

    def _gradient(self, dy):
        """Blocked copy of the output gradient that a user handed in."""
        if self.unit is None:
            raise ValueError(f"{self.layer!r}: call forward first")
        output = self.unit.plan.output
        dy = as_float32(dy, "dy", (len(self.unit.x), *output.logical_shape))
        return block(np.ascontiguousarray(dy), output, num_threads=self.num_threads)
