"""The weights of a whole network: logical arrays under PyTorch's names, flat arrays by layer, and how they start.

Everything shaped like the weights goes through here: the weights themselves, gradients, momentum; and so does the
question which part of them this rank holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt

import numpy as np

from pcldnn.layers.base import LayerPlan
from pcldnn.layers.parameter import draw_parameters, glorot_std
from pcldnn.layout import aligned_zeros, as_float32
from pcldnn.plan import Plan
from pcldnn.units import Placement

LAST_GAIN = 0.1  # of weights without an activation behind them: those of the class scores


class Weights:
    """Flat arrays of all layers that learn.

    Attributes
    ----------
    layers : tuple of LayerPlan
        Those with parameters.
    flat : dict of str to ndarray
        By layer: all its parameters, or this rank's part of them; empty until they are drawn or loaded.
    placements : dict of str to Placement
        Of a network that is prepared for training on a number of ranks; else empty.
    """

    def __init__(self, plan: Plan):
        self.layers: tuple[LayerPlan, ...] = tuple(layer for layer in plan.layers if layer.parameters)
        self.flat: dict[str, np.ndarray] = {}
        self.placements: dict[str, Placement] = {}

    @property
    def is_split(self) -> bool:
        """Whether this rank holds only a part of some layer: then reading weights is collective."""
        return any(placement.is_split for placement in self.placements.values())

    def place(self, placements: dict[str, Placement]) -> None:
        """Hold what these placements say, from now on; collective if some layer is split now."""
        for layer in self.layers:
            if layer.name in self.flat:
                whole = self._whole(layer, self.flat[layer.name])
                self.flat[layer.name] = placements[layer.name].cut(whole) if placements else whole
        self.placements = placements

    def draw(self, layers, seed: int) -> None:
        """Set starting values; `layers` are the network's (name, layer) pairs. See `Network.initialize`."""
        learning = {layer.index for layer in self.layers}
        for layer in self.layers:
            spread = _weight_std([layer for _, layer in layers], learning, layer.index)
            self.store(draw_parameters(layer.parameters, spread, seed, layer.index), layer)

    def load(self, logical: dict) -> None:
        """Set all weights; ValueError, before anything is changed, as for `check`."""
        for layer, values in self.by_layer(self.check(logical)):
            self.store(values, layer)

    def store(self, values: dict[str, np.ndarray], layer: LayerPlan) -> None:
        """Set a layer's parameters from logical arrays under their own names."""
        placement = self.placements.get(layer.name)
        if layer.name not in self.flat:
            self.flat[layer.name] = aligned_zeros((placement.part if placement else layer).parameter_size)
        if placement and placement.is_split:
            whole = aligned_zeros(layer.parameter_size)
            layer.to_flat(values, whole)
            self.flat[layer.name][:] = placement.cut(whole)
        else:
            layer.to_flat(values, self.flat[layer.name])

    def logical(self, flat: dict[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        """Copies in logical order, under PyTorch's names, of arrays like `self.flat`; collective if split."""
        for layer in self.layers:
            yield self._logical(layer, self._whole(layer, flat[layer.name]))

    def gather_shards(self, shards: dict[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        """See `Network.gather_shards`."""
        for layer in self.layers:
            yield self._logical(layer, self.placements[layer.name].gather_shard(shards[layer.name]))

    def cut_shards(self, logical: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """See `Network.cut_shards`."""
        shards = {}
        for layer, values in self.by_layer(self.check(logical)):
            flat = aligned_zeros(layer.parameter_size)
            layer.to_flat(values, flat)
            shards[layer.name] = self.placements[layer.name].cut_shard(flat)
        return shards

    def check(self, values: dict) -> dict[str, np.ndarray]:
        """`values` as float32; ValueError when one is missing, unknown or of the wrong shape or dtype."""
        shapes = {f"{layer.name}.{p.name}": p.shape for layer in self.layers for p in layer.parameters}
        missing = sorted(set(shapes) - set(values))
        unknown = sorted(set(values) - set(shapes))
        if missing or unknown:
            raise ValueError(f"state: missing {missing or 'nothing'}, not in this network {unknown or 'nothing'}")
        return {name: as_float32(values[name], name, shape) for name, shape in shapes.items()}

    def by_layer(self, values: dict[str, np.ndarray]) -> Iterator[tuple[LayerPlan, dict[str, np.ndarray]]]:
        """Each layer with its own parameters, under their own names."""
        for layer in self.layers:
            yield layer, {parameter.name: values[f"{layer.name}.{parameter.name}"] for parameter in layer.parameters}

    def _whole(self, layer: LayerPlan, flat: np.ndarray) -> np.ndarray:
        placement = self.placements.get(layer.name)
        return placement.gather(flat) if placement else flat

    def _logical(self, layer: LayerPlan, whole: np.ndarray) -> dict[str, np.ndarray]:
        return {f"{layer.name}.{name}": value for name, value in layer.from_flat(whole).items()}


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
