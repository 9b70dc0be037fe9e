"""Which arrays a step needs, and where each one lies in one arena.

A step is a sequence of slots: the input arrives, forward of each layer, the loss, then from the last layer to
the first its weight gradient and its input gradient. Each array lives from the slot that writes it to the last slot
that reads it; two arrays may share memory when their lives do not meet. So activations that backward needs are
kept, gradients of activations hand their memory down the network, and scratch is shared, by one rule.
"""

from __future__ import annotations

from dataclasses import dataclass

from pcldnn.grid import grid_arrays
from pcldnn.layers.base import PASSES, LayerPlan
from pcldnn.layout import ALIGNMENT, FLOAT


@dataclass(frozen=True)
class Buffer:
    """Memory that one array, or several that are one in memory, occupies in the arena during a part of a step."""

    roles: tuple[tuple[str, str], ...]  # (layer, "output" | "input_grad" | "places" | "<pass> scratch", or of
    # `grid_arrays`), first writer first
    size: int  # [float32]
    first: int  # slots of the step, both inclusive
    last: int
    offset: int  # [float32] in the arena

    @property
    def name(self) -> str:
        return " ".join(self.roles[0])


@dataclass(eq=False)
class _Life:
    """A buffer in the making."""

    roles: list[tuple[str, str]]
    size: int
    first: int
    last: int
    kept: bool = False  # backward reads what it holds now: nothing may overwrite it in place


class _Lives:
    """Collects the arrays of a step and the slots in which they are alive."""

    def __init__(self, layers: list[LayerPlan]):
        self.layers = layers
        self.lives: list[_Life] = []
        self.loss = len(layers) + 1
        self.end = self.loss + 2 * len(layers)

    def slot(self, pass_name: str, i: int) -> int:
        """When layer number i makes a pass: 0 is the arrival of the input, `loss` the loss, `end` the last one."""
        return {"forward": 1 + i, "weight_grad": self.end - 1 - 2 * i, "input_grad": self.end - 2 * i}[pass_name]

    def new(self, layer: str, role: str, size: int, slot: int) -> _Life:
        self.lives.append(_Life([(layer, role)], size, slot, slot))
        return self.lives[-1]

    def activations(self, training: bool) -> None:
        """Outputs: alive until the next layer has read them, or until backward has."""
        images, layout = self.layers[0].images, self.layers[0].input
        value = self.new("input", "output", images * layout.padded_features, 0)
        value.kept = True
        if training:
            value.last = self.end  # so that a step can be replayed to find where a NaN came from
        for i, layer in enumerate(self.layers):
            read_again = self.slot("input_grad", i)
            value.last = max(value.last, self.slot("forward", i))
            saves = layer.saves if layer.partition.model == 1 else ()  # on a grid the layer saves what is its own
            if training and "input" in saves:
                value.last = max(value.last, read_again)
            aliasing = layer.layer.aliasing
            if aliasing == "view" or (aliasing == "in_place" and not value.kept):
                value.roles.append((layer.name, "output"))
            else:
                size = images * layer.output.padded_features
                value = self.new(layer.name, "output", size, self.slot("forward", i))
            if training and "output" in saves:
                value.last = max(value.last, read_again)
                value.kept = True
            if layer.places_size:
                places = self.new(layer.name, "places", layer.places_size, self.slot("forward", i))
                places.last = self.slot("weight_grad", i)
        value.last = self.end if training else self.loss  # users may read the logits until the next step

    def gradients(self) -> None:
        """Gradients of activations: from the layer behind, which writes one, to the layer before, which reads it."""
        images = self.layers[0].images
        gradient = self.new("loss", "input_grad", images * self.layers[-1].output.padded_features, self.loss)
        for i, layer in reversed(list(enumerate(self.layers))):
            if layer.weight_grad:
                gradient.last = self.slot("weight_grad", i)
            if not layer.input_grad:
                break
            gradient.last = slot = self.slot("input_grad", i)
            if layer.layer.aliasing == "none":
                gradient = self.new(layer.name, "input_grad", images * layer.input.padded_features, slot)
            else:
                gradient.roles.append((layer.name, "input_grad"))

    def scratch(self, training: bool) -> None:
        """Working memory, alive during its pass only, and what layers on a grid keep for themselves."""
        for i, layer in enumerate(self.layers):
            for array in grid_arrays(layer, training):
                life = self.new(layer.name, array.role, array.size, self.slot(array.first, i))
                life.last = self.slot(array.last, i)
            for name in PASSES:
                made = getattr(layer, name)
                if made and made.scratch:
                    self.new(layer.name, f"{name} scratch", made.scratch, self.slot(name, i))


def plan_buffers(layers: list[LayerPlan], training: bool) -> tuple[Buffer, ...]:
    """Which arrays a step needs, when they are alive, and where each one lies."""
    lives = _Lives(layers)
    lives.activations(training)
    if training:
        lives.gradients()
    lives.scratch(training)
    return _place(lives.lives)


def _place(lives: list[_Life]) -> tuple[Buffer, ...]:
    """Give each buffer the lowest offset at which it meets no other that is alive at the same time, largest first."""
    unit = ALIGNMENT // FLOAT
    placed: list[Buffer] = []
    for life in sorted(lives, key=lambda life: (-life.size, life.first)):
        offset = 0
        for other in sorted(placed, key=lambda buffer: buffer.offset):
            together = life.first <= other.last and other.first <= life.last
            if together and offset + life.size > other.offset:
                offset = max(offset, -(-(other.offset + other.size) // unit) * unit)
        placed.append(Buffer(tuple(life.roles), life.size, life.first, life.last, offset))
    return tuple(sorted(placed, key=lambda buffer: buffer.first))
