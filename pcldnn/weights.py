"""The parameters of a network, as far as this rank holds them: flat blocked arrays, and logical ones for users."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pcldnn.layers.base import LayerPlan
from pcldnn.layout import aligned_zeros, as_float32
from pcldnn.units import Placement


class Weights:
    """Flat arrays of all layers that learn.

    Parameters
    ----------
    layers : list of LayerPlan
        Those with parameters.

    Attributes
    ----------
    flat : dict of str to ndarray
        By layer: all its parameters, or this rank's part of them; empty until they are drawn or loaded.
    placements : dict of str to Placement
        Of a network that is prepared for training on a number of ranks; else empty.
    """

    def __init__(self, layers: list[LayerPlan]):
        self.layers = layers
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

    def logical(self, flat: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Copies in logical order, under PyTorch's names, of arrays like `self.flat`; collective if split."""
        return {name: value for layer in self.layers for name, value in
                self._logical(layer, self._whole(layer, flat[layer.name]))}  # fmt: skip

    def gather_shards(self, shards: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Logical arrays, named like the weights, of something that ranks hold in shards (momentum). Collective."""
        return {name: value for layer in self.layers for name, value in
                self._logical(layer, self.placements[layer.name].gather_shard(shards[layer.name]))}  # fmt: skip

    def cut_shards(self, logical: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """This rank's shards of logical arrays named like the weights: the inverse of `gather_shards`."""
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

    def _logical(self, layer: LayerPlan, whole: np.ndarray) -> list[tuple[str, np.ndarray]]:
        return [(f"{layer.name}.{name}", value) for name, value in layer.from_flat(whole).items()]
