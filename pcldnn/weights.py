"""The weights of a whole network: logical arrays under PyTorch's names, flat arrays by layer, and how they start.

Everything shaped like the weights goes through here: the weights themselves, gradients, momentum.
"""

from __future__ import annotations

from math import sqrt

import numpy as np

from pcldnn.layers.base import LayerPlan
from pcldnn.layers.parameter import draw_parameters, glorot_std
from pcldnn.layout import aligned_zeros, as_float32
from pcldnn.plan import Plan

LAST_GAIN = 0.1  # of weights without an activation behind them: those of the class scores


class Weights:
    """Conversion between `{"features.0.weight": (K, C, R, S) array, ...}` and `{"features.0": flat array, ...}`.

    Holds no arrays itself.
    """

    def __init__(self, plan: Plan):
        self.layers: tuple[LayerPlan, ...] = tuple(layer for layer in plan.layers if layer.parameters)
        self.shapes = {f"{layer.name}.{p.name}": p.shape for layer in self.layers for p in layer.parameters}

    def zeros(self) -> dict[str, np.ndarray]:
        """New flat arrays."""
        return {layer.name: aligned_zeros(layer.parameter_size) for layer in self.layers}

    def to_logical(self, flat: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Logical copies."""
        return {
            f"{layer.name}.{name}": value
            for layer in self.layers
            for name, value in layer.from_flat(flat[layer.name]).items()
        }

    def to_flat(self, logical: dict, flat: dict[str, np.ndarray]) -> None:
        """Write logical arrays into flat ones.

        Raises ValueError, before anything is written, when one is missing, unknown or of the wrong shape or dtype.
        """
        missing = sorted(set(self.shapes) - set(logical))
        unknown = sorted(set(logical) - set(self.shapes))
        if missing or unknown:
            raise ValueError(f"state: missing {missing or 'nothing'}, not in this network {unknown or 'nothing'}")
        checked = {name: as_float32(logical[name], name, shape) for name, shape in self.shapes.items()}
        for layer in self.layers:
            layer.to_flat({p.name: checked[f"{layer.name}.{p.name}"] for p in layer.parameters}, flat[layer.name])

    def draw(self, layers, seed: int, flat: dict[str, np.ndarray]) -> None:
        """Write starting values; `layers` are the network's (name, layer) pairs. See `Network.initialize`."""
        learning = {layer.index for layer in self.layers}
        for layer in self.layers:
            spread = _weight_std([layer for _, layer in layers], learning, layer.index)
            layer.to_flat(draw_parameters(layer.parameters, spread, seed, layer.index), flat[layer.name])


def _weight_std(layers, learning: set[int], index: int):
    """The rule for the spread of a layer's weights, from the layers between it and its neighbours with weights."""
    gain = 1.0
    for before in reversed(range(index)):
        if before in learning:
            break
        gain /= sqrt(layers[before].spread)
    for behind in range(index + 1, len(layers)):
        if behind in learning:
            break
        rule = layers[behind].weight_std
        if rule:
            return lambda fan_in, fan_out: gain * rule(fan_in, fan_out)
    return lambda fan_in, fan_out: LAST_GAIN * gain * glorot_std(fan_in, fan_out)
