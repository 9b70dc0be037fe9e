"""Convolution."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from pcldnn import _kernels as kernels
from pcldnn import balance
from pcldnn import blocking as solver
from pcldnn import winograd_blocking as winograd
from pcldnn.blocking import ConvShape
from pcldnn.layers.activation import ReLU
from pcldnn.layers.base import Layer, called_blocks, mask_and_sum, pair, per_rank
from pcldnn.layers.parameter import Bias, Parameter
from pcldnn.layers.pool import MaxPool2d
from pcldnn.layout import FLOAT, Layout, blocks, filter_from_blocked, filter_to_blocked


def windows(size: int, kernel: int, stride: int, padding: int) -> int:
    """Output size along one dimension: whole windows that fit in the padded input (at least 1, or ValueError)."""
    if size + 2 * padding < kernel:
        raise ValueError(
            f"the input of size {size} with padding {padding} is smaller than the kernel of size {kernel} "
            f"(stride {stride}): there is no output"
        )
    return (size + 2 * padding - kernel) // stride + 1


@dataclass(frozen=True)
class Filter(Parameter):
    """Filters of a convolution, (K, C, R, S)."""

    def to_blocked(self, logical):
        return filter_to_blocked(logical, *self.array_shape[-2:])

    def from_blocked(self, blocked):
        return filter_from_blocked(blocked, *self.shape[:2])


@dataclass(frozen=True)
class Conv2d(Layer):
    """2-D convolution (cross-correlation, as everywhere in this field) with optional bias.

    Parameters
    ----------
    in_channels, out_channels : int
        The paper's ifm and ofm; any number from 1.
    kernel_size, stride, padding : int or (vertical, horizontal)
        Any padding is legal, also one as large as the kernel or larger.
    bias : bool
    """

    in_channels: int
    out_channels: int
    kernel_size: int | tuple[int, int]
    stride: int | tuple[int, int] = 1
    padding: int | tuple[int, int] = 0
    bias: bool = True

    saves = frozenset({"input"})
    takes_unpadded = True
    splittable = True
    nickname = "conv"

    def __post_init__(self):
        if self.in_channels < 1 or self.out_channels < 1:
            raise ValueError(f"Conv2d: got {self.in_channels} to {self.out_channels} channels, wanted at least 1")
        for name, least in (("kernel_size", 1), ("stride", 1), ("padding", 0)):
            object.__setattr__(self, name, pair(getattr(self, name), f"Conv2d {name}", least))

    def output_layout(self, input: Layout, block: int) -> Layout:
        channels, height, width = input.shape
        if input.flat:
            raise ValueError(f"the input is a vector of {input.features} features, wanted images (C, H, W)")
        if channels != self.in_channels:
            raise ValueError(f"the input has {channels} channels, wanted in_channels = {self.in_channels}")
        size = (height, width)
        rows, columns = map(windows, size, self.kernel_size, self.stride, self.padding)
        return Layout((self.out_channels, rows, columns), block)

    def parameters(self, input: Layout, block: int) -> tuple[Parameter, ...]:
        out_blocks = blocks(self.out_channels, block)
        array_shape = (out_blocks, input.channel_blocks, *self.kernel_size, input.block, block)
        weight = Filter("weight", (self.out_channels, self.in_channels, *self.kernel_size), array_shape)
        return (weight, Bias.of(self.out_channels, block)) if self.bias else (weight,)

    def multiply_adds(self, input: Layout, output: Layout) -> int:
        return output.features * self.in_channels * self.kernel_size[0] * self.kernel_size[1]

    def plan_pass(self, pass_name, plan, machine, threads):
        out_blocks = called_blocks(pass_name, plan)
        shape = ConvShape(
            plan.call_images, self.in_channels, *plan.input.shape[1:],
            min(out_blocks * plan.output.block, self.out_channels), *self.kernel_size,
            self.stride, self.padding, plan.input.block,
        )  # fmt: skip
        called = replace(shape, N=plan.group_images)  # blocking may be for a piece of them: LayerPlan.call_images
        made = super().plan_pass(pass_name, plan, machine, threads)
        algorithm = dict(plan.tuned).get(pass_name) or chosen_algorithm(plan.algorithm)
        if uses_winograd(pass_name, shape, machine, algorithm):
            made = replace(made, algorithm="winograd", **plan_winograd(pass_name, shape, called, machine))
            if pass_name == "input_grad":
                called = winograd.input_grad_shape(called)
            traffic = balance.winograd_traffic(called, machine, made.blocking, pass_name == "weight_grad")
            saving = balance.winograd_saving(shape, called)
            return replace(made, saving=saving, traffic=per_rank(traffic, pass_name, plan))
        weight_size = plan.parameters[0].array_size // plan.output.channel_blocks * out_blocks
        if pass_name == "forward":
            at_once = solver.ConvBlocking(plan.input.channel_blocks, False, shape.P)  # as the kernel that pools has it
            blocking = at_once if plan.pooled else solver.conv_forward(shape, machine)
            scratch = solver.pack_size(called, machine) if blocking.across_images else 0
            traffic = balance.conv_traffic(called, machine, blocking)
        elif pass_name == "input_grad":
            blocking, scratch = solver.conv_input_grad(shape, machine), weight_size  # the transposed filters
            if blocking.across_images:
                scratch += solver.pack_size(solver.gradient_shape(called), machine)
            traffic = balance.conv_traffic(solver.gradient_shape(called), machine, blocking) + 2 * FLOAT * weight_size
        else:
            blocking = solver.conv_weight_grad(shape, machine, threads)
            scratch = (blocking.copies - 1) * weight_size
            if blocking.across_images:
                outputs = out_blocks * plan.computed.block_features
                scratch += plan.call_images * (plan.input.padded_features + outputs)
            traffic = balance.weight_grad_traffic(called, machine, blocking)
        if plan.pooled:
            unpooled, pooled = (layout.array_bytes(plan.images) for layout in (plan.computed, plan.output))
            places = FLOAT * plan.places_size
            if pass_name == "forward":
                made, traffic = replace(made, bytes=made.bytes + places), traffic - unpooled + pooled + places
            else:  # the gradient before pooling is written, and read
                made = replace(made, bytes=made.bytes + places + 2 * unpooled)
                scratch, traffic = scratch + unpooled // FLOAT, traffic + unpooled + pooled + places
        return replace(made, blocking=blocking, scratch=scratch, traffic=per_rank(traffic, pass_name, plan))

    def absorbs(self, following: Layer) -> bool:
        return isinstance(following, ReLU)

    def pools(self, plan, following):
        # Of a network's unpadded input: nobody asks for its gradient, which would want the one before pooling as well,
        # and Winograd cannot take it. A layer on a grid, or in exact mode, has arrays of its own.
        few, alone = plan.input.block < plan.output.block, plan.partition.model == 1 and not plan.pieces
        return few and alone and isinstance(following, MaxPool2d) and following.halves(plan.output)

    def compute_forward(self, unit, x, y, step):
        weight, bias, relu = unit.value["weight"], unit.value.get("bias"), unit.plan.fused is not None
        made = unit.plan.forward
        if unit.plan.pooled:
            places = places_of(unit, y.shape)
            kernels.conv2d_pool_forward(x, weight, bias, y, places, self.stride, self.padding, unit.num_threads)
        elif made.algorithm == "winograd":
            filters, scratch = transformed_filters(unit, "forward", weight.shape[0], weight.shape[1])
            kernels.winograd_transform_filter(weight, filters, False, unit.num_threads)
            kernels.winograd_forward(
                x, filters, bias, y, self.padding, relu, scratch, made.blocking, unit.num_threads, self.kernel_size[0]
            )  # fmt: skip
        else:
            kernels.conv2d_forward(
                x, weight, bias, y, self.stride, self.padding, relu, made.blocking, unit.num_threads,
                unit.memory.scratch.get("forward"),
            )  # fmt: skip

    def compute_weight_grad(self, unit, dy):
        made, scratch = unit.plan.weight_grad, unit.memory.scratch.get("weight_grad")
        if unit.plan.pooled:
            shape = unit.plan.computed.array_shape(len(dy))
            places, unpooled, scratch = places_of(unit, dy.shape), scratch[: prod(shape)], scratch[prod(shape) :]
            unpooled, sums = unpooled.reshape(shape), unit.pixel_sums[: len(dy)]
            kernels.conv2d_pool_output_grad(dy, places, unpooled, sums, unit.num_threads)
            dy = unpooled
        mask_and_sum(unit, dy)
        if made.algorithm == "winograd":
            kernels.winograd_weight_grad(
                unit.x, dy, unit.grad["weight"], self.padding, scratch, made.blocking, unit.num_threads
            )  # fmt: skip
        else:
            kernels.conv2d_weight_grad(
                unit.x, dy, unit.grad["weight"], self.stride, self.padding, scratch, made.blocking, unit.num_threads
            )  # fmt: skip

    def compute_input_grad(self, unit, dy, dx):
        self.compute_input_grad_of(unit, dy, dx, 0, len(unit.value["weight"]))

    def compute_input_grad_of(self, unit, dy, dx, start, stop):
        if start == stop:
            dx[...] = 0
            return
        weight, made = unit.value["weight"][start:stop], unit.plan.input_grad
        out_blocks, in_blocks, rows, columns, lanes, block = weight.shape
        if made.algorithm == "winograd":
            filters, scratch = transformed_filters(unit, "input_grad", in_blocks, out_blocks)
            kernels.winograd_transform_filter(weight, filters, True, unit.num_threads)
            kernels.winograd_input_grad(
                dy, filters, dx, self.padding, scratch, made.blocking, unit.num_threads, self.kernel_size[0]
            )  # fmt: skip
            return
        scratch = unit.memory.scratch["input_grad"]
        weight_t = scratch[: weight.size].reshape(in_blocks, out_blocks, rows, columns, block, lanes)
        kernels.conv2d_transpose_filter(weight, weight_t, unit.num_threads)
        kernels.conv2d_input_grad(
            dy, weight_t, dx, self.stride, self.padding, made.blocking, unit.num_threads, scratch[weight.size :],
        )  # fmt: skip

    def __str__(self) -> str:
        size = f"{self.kernel_size[0]}x{self.kernel_size[1]}"
        stride = "" if self.stride == (1, 1) else f" stride {self.stride[0]}x{self.stride[1]}"
        return f"Conv2d {size}{stride}"


def places_of(unit, shape: tuple[int, ...]):
    """Where the maxima of the pooling that a convolution applies were, int8; None when nobody will ask."""
    if not unit.plan.places_size:
        return None
    return unit.memory.scratch["places"].view(np.int8)[: prod(shape)].reshape(shape)


# --- direct or Winograd -----------------------------------------------------------------------------------------

ALGORITHMS = ("auto", "direct", "winograd")


def chosen_algorithm(asked: str | None) -> str:
    """What was asked for, else what the environment variable PCLDNN_CONV says, else "auto"."""
    name, source = (asked, "algorithm") if asked else (os.environ.get("PCLDNN_CONV") or "auto", "PCLDNN_CONV")
    if name not in ALGORITHMS:
        raise ValueError(f"{source}: got {name!r}, wanted one of {', '.join(ALGORITHMS)}")
    return name


def uses_winograd(pass_name: str, shape: ConvShape, machine, algorithm: str) -> bool:
    """Whether a pass is computed by Winograd: it can be, and the user or the model says so."""
    if algorithm == "direct" or not winograd.fits(shape, machine):
        return False
    if pass_name == "input_grad":
        shape = winograd.input_grad_shape(shape)
    return algorithm == "winograd" or winograd.pays(shape, machine)


def plan_winograd(pass_name: str, shape: ConvShape, called: ConvShape, machine) -> dict:
    """Blocking for `shape`, and scratch of a pass over `called`, which may have more images.

    Scratch is a batch of tiles, behind the transformed filters (or their gradient).
    """
    if pass_name == "input_grad":
        shape, called = map(winograd.input_grad_shape, (shape, called))
    if pass_name == "weight_grad":
        blocking = winograd.weight_grad(shape, machine)
    else:
        blocking = winograd.forward(shape, machine)
    scratch = winograd.filter_size(called, machine)
    return {"blocking": blocking, "scratch": scratch + winograd.scratch(called, machine, blocking)}


def transformed_filters(unit, pass_name: str, out_blocks: int, in_blocks: int):
    """The scratch of a pass in two: transformed filters, and the rest."""
    block, scratch = unit.value["weight"].shape[-1], unit.memory.scratch[pass_name]
    size = winograd.POINTS * out_blocks * in_blocks * block * block
    return scratch[:size].reshape(winograd.POINTS, out_blocks, in_blocks * block, block), scratch[size:]
