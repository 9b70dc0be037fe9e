"""The loss at the end of a network."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace

import numpy as np

from pcldnn import _kernels as kernels
from pcldnn.layers.base import by_image
from pcldnn.layout import Layout, as_float32, as_integers, block, unblock


@dataclass(frozen=True)
class CrossEntropyLoss:
    """Softmax and cross entropy in one: log(sum(exp(logits))) - logits[label], exact for any logits.

    Used alone, as in PyTorch, `forward` is the mean over the samples and `input_grad` the gradient of that mean.
    """

    def check(self, output: Layout) -> None:
        """Refuse a network whose output is no vector of class scores."""
        if not output.flat:
            raise ValueError(
                f"{type(self).__name__} wants one vector of class scores an image, but the network ends with images of "
                f"shape {output.shape}: put Flatten at its end"
            )

    def compute(self, logits, labels, num_classes, scale, losses, dlogits, num_threads) -> None:
        """Write each sample's loss [nat] to `losses` and `scale` times the gradient to `dlogits`, blocked arrays.

        Raises ValueError, before anything is written, for a label outside 0..num_classes-1.
        """
        kernels.softmax_cross_entropy(
            by_image(logits), labels, num_classes, scale, losses, by_image(dlogits), num_threads
        )

    @cached_property
    def _lone(self):
        return SimpleNamespace(gradient=None)

    def forward(self, logits, labels) -> float:
        """Mean loss of `logits` (N, classes) for integer `labels` (N,)."""
        logits = as_float32(logits, "logits", (None, None))
        labels = as_integers(labels, "labels", len(logits))
        if not logits.size:
            raise ValueError(f"logits: got shape {logits.shape}, wanted at least one sample and one class")
        layout = Layout.vector(logits.shape[1], kernels.SIMD_WIDTH)
        losses = np.empty(len(logits))
        blocked = block(logits, layout)
        gradient = np.empty_like(blocked)
        self.compute(blocked, labels, layout.features, 1 / len(logits), losses, gradient, 1)
        self._lone.gradient = unblock(gradient, layout)
        return float(losses.mean())

    def input_grad(self) -> np.ndarray:
        """Gradient of the last `forward` with respect to its logits."""
        if self._lone.gradient is None:
            raise ValueError("CrossEntropyLoss.input_grad: call forward first")
        return self._lone.gradient
