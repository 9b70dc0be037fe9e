"""From images to vectors."""

from __future__ import annotations

from dataclasses import dataclass

from pcldnn.layers.base import Layer
from pcldnn.layout import Layout


@dataclass(frozen=True)
class Flatten(Layer):
    """(N, C, H, W) to (N, C*H*W).

    The array stays where and as it is, channels innermost; the fully connected layer behind has its weights permuted
    to match when they are loaded (`layout.linear_to_blocked`), so users see PyTorch's order.
    """

    aliasing = "view"

    def output_layout(self, input: Layout, block: int) -> Layout:
        return input.flattened()

    def compute_forward(self, unit, x, y, step):
        pass

    def compute_input_grad(self, unit, dy, dx):
        pass
