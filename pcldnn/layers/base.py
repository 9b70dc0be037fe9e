"""What a layer is: a description, its plan, and the same thing at run time.

`Layer` is the description: hyper-parameters only, hashable, no arrays. `Layer.plan` turns it into a `LayerPlan` for a
given input. A `Unit` joins a LayerPlan to memory and calls the layer's `compute_` methods, which call kernels.

To add a layer, write one subclass of Layer (`activation.py` shows the short form, `conv.py` the long one): a frozen
dataclass with PyTorch's argument names that overrides what differs from the defaults here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

import numpy as np

from pcldnn import _kernels as kernels
from pcldnn.layers.parameter import Parameter
from pcldnn.layout import FLOAT, Layout, aligned_zeros
from pcldnn.machine import Machine
from pcldnn.partition import Partition, shares

ONE_RANK = Partition()
PASSES = ("forward", "weight_grad", "input_grad")  # in the order in which a step makes them


def pair(value: int | tuple[int, int], name: str, least: int) -> tuple[int, int]:
    """`(vertical, horizontal)` from one integer or two, as PyTorch takes kernel sizes, strides and paddings."""
    both = (value, value) if isinstance(value, (int, np.integer)) else tuple(value)
    if len(both) != 2 or not all(isinstance(v, (int, np.integer)) and v >= least for v in both):
        raise ValueError(f"{name}: got {value!r}, wanted one or two integers of at least {least}")
    return int(both[0]), int(both[1])


# --- plan -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PassPlan:
    """How one pass of one layer is to be computed."""

    algorithm: str = "direct"
    flop: int = 0  # a multiply-add is 2; for all images of this rank, as direct convolution makes them
    bytes: int = 0  # that must move at least: every array of this rank once [byte]
    scratch: int = 0  # float32 elements of working memory
    blocking: object = None  # cache blocks; None leaves them to the kernel
    traffic: int = 0  # that this blocking moves between L2 and what lies behind it, by balance.py's model [byte]
    saving: float = 1.0  # flop over what the algorithm makes of them


@dataclass(frozen=True)
class LayerPlan:
    """Everything decided about one layer of a network before it runs."""

    index: int  # position in the network's list; keys random numbers
    name: str
    layer: Layer
    input: Layout
    output: Layout
    images: int  # most images of this rank in a step
    parameters: tuple[Parameter, ...] = ()
    fused: Layer | None = None  # the activation that this layer's kernel applies as well
    partition: Partition = ONE_RANK
    algorithm: str | None = None  # that the user asks for; None leaves the choice to the model
    pieces: int = 0  # of the minibatch and of the outputs, added in a tree: exact mode; 0 adds as it comes
    piece_images: int = 0  # most images of such a piece
    tuned: tuple[tuple[str, str], ...] = ()  # (pass, algorithm) where the choice is not the model's: `tuning.py`
    relu_input: bool = False  # the input gradient is to be that of the ReLU before this layer as well
    pooled: Layer | None = None  # the pooling behind `fused` that this layer's kernel applies as well
    masked: bool = False  # the gradient of `fused` is made by the layer after this one, or with that of `pooled`
    forward: PassPlan = PassPlan()
    weight_grad: PassPlan | None = None  # None: the pass is not made
    input_grad: PassPlan | None = None

    @property
    def algorithms(self) -> dict[str, str]:
        """The algorithm of each pass that is made."""
        return {name: getattr(self, name).algorithm for name in PASSES if getattr(self, name)}

    @property
    def saves(self) -> frozenset[str]:
        """Which of "input" and "output" the backward passes read."""
        return self.layer.saves | (self.fused.saves if self.fused and not self.pooled else frozenset())

    @property
    def computed(self) -> Layout:
        """Layout of what the layer itself computes, before `pooled`."""
        return self.layer.output_layout(self.input, self.output.block) if self.pooled else self.output

    @property
    def places_size(self) -> int:
        """Memory for the places of the maxima of `pooled`, a byte each [float32]."""
        return self.images * self.output.padded_features // FLOAT if self.pooled and self.weight_grad else 0

    @property
    def call_images(self) -> int:
        """Images for which blocking is chosen: it may decide the order of sums, so in exact mode not the rank's."""
        return self.piece_images or self.group_images

    @property
    def group_images(self) -> int:
        """Most images that pass through this layer on a rank: those of all ranks of its group."""
        return self.images * self.partition.model

    @property
    def parameter_count(self) -> int:
        """Numbers, logical."""
        return sum(parameter.count for parameter in self.parameters)

    @property
    def parameter_size(self) -> int:
        """Numbers of the flat array that holds all parameters (padded lanes included) one after the other."""
        return sum(parameter.array_size for parameter in self.parameters)

    def views(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """The blocked parameters as views of their flat array."""
        views, start = {}, 0
        for parameter in self.parameters:
            views[parameter.name] = flat[start : start + parameter.array_size].reshape(parameter.array_shape)
            start += parameter.array_size
        return views

    def to_flat(self, logical: dict[str, np.ndarray], flat: np.ndarray) -> None:
        """Write logical arrays into the flat array."""
        for parameter in self.parameters:
            self.views(flat)[parameter.name][...] = parameter.to_blocked(logical[parameter.name])

    def from_flat(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """Logical copies of the parameters (or gradients, or momentum) in a flat array."""
        return {p.name: p.from_blocked(self.views(flat)[p.name]) for p in self.parameters}

    def __str__(self) -> str:
        return " + ".join(str(layer) for layer in (self.layer, self.fused, self.pooled) if layer)


def called_blocks(pass_name: str, plan: LayerPlan) -> int:
    """Output blocks for which a pass is planned: the largest slice of a member of a group (see grid.py).

    In exact mode the order of sums must not depend on members: all of them, and a piece in the input gradient.
    """
    parts = plan.partition.model
    if plan.pieces:
        parts = plan.pieces if pass_name == "input_grad" else 1
    return shares(plan.output.channel_blocks, parts)[0]


def per_rank(traffic: int, pass_name: str, plan: LayerPlan) -> int:
    """Bytes for the flop of a rank (`PassPlan.flop`) from those for `called_blocks` and the images of a group."""
    channels = min(called_blocks(pass_name, plan) * plan.output.block, plan.output.channels)
    return round(traffic * plan.output.channels / (channels * plan.partition.model))


# --- run time ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepContext:
    """What a forward pass knows beside its input."""

    training: bool = False
    seed: int = 0
    epoch: int = 0
    sample_ids: np.ndarray | None = None  # int64 (N,): which sample of the data set each image is
    counts: tuple[int, ...] = ()  # images of each rank; read only when several ranks share a layer
    piece_counts: tuple[int, ...] = ()  # images of each piece of the minibatch, in exact mode


@dataclass
class Memory:
    """The arrays of one Unit. Activations and gradients hold `images` images; a step uses the leading ones."""

    output: np.ndarray
    input_grad: np.ndarray | None = None
    parameters: np.ndarray | None = None  # flat: blocked weight, then padded bias; the unit of exchange
    gradients: np.ndarray | None = None  # likewise
    scratch: dict[str, np.ndarray] = field(default_factory=dict)  # by pass, or by what else it is for

    @classmethod
    def alone(cls, plan: LayerPlan, images: int) -> Memory:
        """Zeros for every pass that `plan` makes, shared with no other layer. What no pass touches takes no memory."""
        return cls(
            output=aligned_zeros(plan.output.array_shape(images)),
            input_grad=aligned_zeros(plan.input.array_shape(images)),
            parameters=aligned_zeros(plan.parameter_size),
            gradients=aligned_zeros(plan.parameter_size),
            scratch={name: aligned_zeros(getattr(plan, name).scratch) for name in plan.algorithms}
            | {"places": aligned_zeros(plan.places_size)},
        )


class Unit:
    """A layer at run time: its plan, its memory, and the arrays saved between the passes of a step.

    The three passes take and give blocked arrays. In a step `weight_grad` is called before `input_grad`: it may
    change `dy` (a fused activation masks it), and an exchange of the layer's gradients can start between the two.
    """

    def __init__(self, plan: LayerPlan, memory: Memory, num_threads: int = 1):
        self.plan = plan
        self.name = plan.name
        self.memory = memory
        self.num_threads = num_threads
        self.parameters = memory.parameters
        self.gradients = memory.gradients
        self.value = plan.views(memory.parameters) if plan.parameters else {}
        self.grad = plan.views(memory.gradients) if memory.gradients is not None else {}
        self.x = self.y = self.step = None  # of the last forward pass
        self.pixel_sums = None  # of the gradient between two units, which the second leaves to the first
        if plan.places_size:
            self.pixel_sums = np.zeros((plan.images, plan.output.channel_blocks, plan.output.block))

    def forward(self, x: np.ndarray, step: StepContext) -> np.ndarray:
        """Output for the blocked images `x`."""
        self.x, self.y, self.step = x, self.memory.output[: len(x)], step
        self.plan.layer.compute_forward(self, x, self.y, step)
        return self.y

    def weight_grad(self, dy: np.ndarray) -> None:
        """Overwrite `gradients` with the sum over the images of the last forward pass."""
        self.plan.layer.compute_weight_grad(self, dy)

    def input_grad(self, dy: np.ndarray) -> np.ndarray:
        """Gradient of the input of the last forward pass."""
        dx = self.memory.input_grad[: len(dy)]
        self.plan.layer.compute_input_grad(self, dy, dx)
        return dx

    def call(self, pass_name: str, x: np.ndarray, dy: np.ndarray):
        """One pass as a call without arguments; backward as behind a forward pass of `x` that left what is in memory."""
        if pass_name == "forward":
            return lambda: self.forward(x, StepContext())
        self.x, self.y = x, self.memory.output[: len(x)]
        return lambda: getattr(self, pass_name)(dy)


def by_channel_block(array: np.ndarray) -> np.ndarray:
    """(N, C/b, H, W, b) seen as (N, C/b, H*W, b): kernels that do not care for rows and columns take this."""
    images, channel_blocks, height, width, block = array.shape
    return array.reshape(images, channel_blocks, height * width, block)


def by_image(array: np.ndarray) -> np.ndarray:
    """(N, C/b, H, W, b) seen as (N, padded features): what a fully connected layer takes."""
    return array.reshape(len(array), prod(array.shape[1:]))


def share_pixel_sums(before: Unit, unit: Unit) -> None:
    """Let `unit` leave the sums of its input gradient over pixels to the unit before, whose bias gradient they make.

    A layer on a grid does not look at them: its gradients are of other ranks' images, too.
    """
    layout = unit.plan.input
    unit.pixel_sums = before.pixel_sums = np.zeros((unit.plan.images, layout.channel_blocks, layout.block))


def mask_and_sum(unit: Unit, dy: np.ndarray) -> None:
    """What a layer with weights does with dy first: mask it for a fused ReLU, in place, and sum it for its bias."""
    masks, bias = unit.plan.fused is not None and not unit.plan.masked, unit.grad.get("bias")
    if unit.pixel_sums is not None and bias is not None:
        bias[...] = unit.pixel_sums[: len(dy)].reshape(len(dy), bias.size).sum(axis=0)
    elif masks and bias is not None:
        kernels.relu_bias_grad(by_channel_block(unit.y), by_channel_block(dy), bias, unit.num_threads)
    elif masks:
        kernels.relu_input_grad(unit.y, dy, dy, unit.num_threads)
    elif bias is not None:
        kernels.bias_grad(by_channel_block(dy), bias, unit.num_threads)


# --- description ------------------------------------------------------------------------------------------------


class Layer:
    """Base of all layers. Subclasses are frozen dataclasses; what follows here is for them to override."""

    aliasing = "none"  # of output and input: "none", "in_place" (the kernel may overwrite its input) or "view"
    saves = frozenset()  # which of "input" and "output" the backward passes read
    masks = False  # its input gradient can be that of a ReLU before it as well
    takes_unpadded = False  # can read an input whose few channels are not padded to the SIMD width
    splittable = False  # ranks can share its outputs: it has `compute_input_grad_of`
    nickname = None  # "conv" or "fc": papers number such layers of a network
    spread = 1.0  # factor by which it raises the mean square of what it passes on
    weight_std = None  # an activation's method (fan_in, fan_out) for the spread of the weights before it

    def output_layout(self, input: Layout, block: int) -> Layout:
        """Layout of the output; ValueError if the layer cannot take this input (the plan adds the layer's name)."""
        return input

    def parameters(self, input: Layout, block: int) -> tuple[Parameter, ...]:
        """Its weights: "weight" first, then "bias"."""
        return ()

    def multiply_adds(self, input: Layout, output: Layout) -> int:
        """Of one image, in each pass. Only these count as flop: the rest of a network is bound by memory."""
        return 0

    def plan_pass(self, pass_name: str, plan: LayerPlan, machine: Machine, threads: int) -> PassPlan:
        """Algorithm, blocking, work and memory of one pass; `plan` has everything but its passes."""
        saved = plan.saves if pass_name == "input_grad" and not plan.parameters else ()
        moved = plan.input.array_bytes(plan.group_images) + FLOAT * plan.parameter_size // plan.partition.model
        moved += sum(layout.array_bytes(plan.images) for layout in (plan.output, *(getattr(plan, s) for s in saved)))
        return PassPlan("direct", 2 * plan.images * self.multiply_adds(plan.input, plan.computed), moved)

    def absorbs(self, following: Layer) -> bool:
        """Whether this layer's kernel can apply the layer that follows as well."""
        return False

    def pools(self, plan: LayerPlan, following: Layer) -> bool:
        """Whether this layer's kernel, as planned, can apply a pooling behind what it absorbs as well."""
        return False

    def compute_forward(self, unit: Unit, x: np.ndarray, y: np.ndarray, step: StepContext) -> None:
        """Write y, padded lanes included (as zeros)."""
        raise NotImplementedError

    def compute_weight_grad(self, unit: Unit, dy: np.ndarray) -> None:
        """Overwrite `unit.grad` from `unit.x` and `dy`. Only layers with parameters are asked."""
        raise NotImplementedError

    def compute_input_grad(self, unit: Unit, dy: np.ndarray, dx: np.ndarray) -> None:
        """Overwrite dx, padded lanes included (as zeros). dx may be dy itself unless `aliasing` is "none"."""
        raise NotImplementedError

    def compute_input_grad_of(self, unit: Unit, dy: np.ndarray, dx: np.ndarray, start: int, stop: int) -> None:
        """The same from the output blocks start..stop-1 alone; dy holds no others."""
        raise NotImplementedError

    # --- the same for all layers ---

    def part(self, plan: LayerPlan, start: int, stop: int) -> LayerPlan:
        """The plan of those of this layer's weights that make the output blocks start..stop-1.

        Only layers that are `splittable` are asked. Blocked weights have output blocks outermost, so a part of them
        is contiguous.
        """
        whole = plan.output
        channels = min(stop * whole.block, whole.channels) - min(start * whole.block, whole.channels)
        parameters = tuple(p.part(channels, stop - start, whole.channel_blocks) for p in plan.parameters)
        return replace(plan, output=replace(whole, shape=(channels, *whole.shape[1:])), parameters=parameters)

    def plan(
        self, input: Layout, images: int, machine: Machine, threads: int = 1, *, index: int = 0, name: str = "",
        fused: Layer | None = None, pooled: Layer | None = None, partition: Partition = ONE_RANK, training: bool = True,
        input_grad: bool = True, algorithm: str | None = None, tuned: dict[str, str] | None = None,
        pieces: int = 0, piece_images: int = 0, relu_input: bool = False,
    ) -> LayerPlan:  # fmt: skip
        """Plan this layer for `images` images of layout `input` on each rank."""
        block = machine.width
        try:
            output = self.output_layout(input, block)
            output = pooled.output_layout(output, block) if pooled else output
        except ValueError as error:
            raise ValueError(f"layer {name or '(unnamed)'}, {self!r}: {error}") from None
        parameters = self.parameters(input, block)
        plan = LayerPlan(
            index, name, self, input, output, images, parameters, fused, partition, algorithm, pieces, piece_images,
            tuple((tuned or {}).items()), relu_input, pooled, masked=pooled is not None,
        )  # fmt: skip
        made = {
            "forward": True,
            "weight_grad": training and bool(plan.parameters),
            "input_grad": training and input_grad,
        }
        return replace(plan, **{p: self.plan_pass(p, plan, machine, threads) if made[p] else None for p in PASSES})

    def __str__(self) -> str:
        return type(self).__name__

    # --- used alone, on logical arrays: see lone.py ---

    @cached_property
    def _lone(self):
        from pcldnn.layers.lone import Lone

        return Lone(self)

    def forward(self, x, *, training: bool = True, epoch: int = 0, sample_ids=None) -> np.ndarray:
        """Output for `x`, `(N, C, H, W)` or `(N, F)`; the other arguments matter to Dropout only."""
        return self._lone.forward(x, training, epoch, sample_ids)

    def weight_grad(self, dy) -> dict[str, np.ndarray]:
        """Gradients of the parameters, summed over the images of the last `forward`, in logical order."""
        return self._lone.weight_grad(dy)

    def input_grad(self, dy) -> np.ndarray:
        """Gradient of the input of the last `forward`."""
        return self._lone.input_grad(dy)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies of the parameters in logical order."""
        return self._lone.state_dict()

    def load_state_dict(self, values: dict) -> None:
        """Set the parameters from logical arrays."""
        self._lone.load_state_dict(values)

    def initialize(self, seed: int = 0) -> None:
        """Draw the parameters anew."""
        self._lone.initialize(seed)
