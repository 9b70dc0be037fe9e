"""Convolution."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pcldnn import _kernels as kernels
from pcldnn.blocking import ConvShape, conv_forward, conv_input_grad, conv_weight_grad, gradient_shape, pack_size
from pcldnn.layers.activation import ReLU
from pcldnn.layers.base import Layer, by_channel_block, pair
from pcldnn.layers.parameter import Bias, Parameter
from pcldnn.layout import Layout, blocks, filter_from_blocked, filter_to_blocked


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
        shape = ConvShape(
            plan.call_images, self.in_channels, *plan.input.shape[1:], self.out_channels, *self.kernel_size,
            self.stride, self.padding, plan.input.block,
        )  # fmt: skip
        called = replace(shape, N=plan.images)  # blocking may be for a piece of them: LayerPlan.call_images
        weight_size = plan.parameters[0].array_size
        if pass_name == "forward":
            blocking = conv_forward(shape, machine)
            scratch = pack_size(called, machine) if blocking.across_images else 0
        elif pass_name == "input_grad":
            blocking = conv_input_grad(shape, machine)
            scratch = weight_size + (pack_size(gradient_shape(called), machine) if blocking.across_images else 0)
        else:
            blocking = conv_weight_grad(shape, machine, threads)
            scratch = (blocking.copies - 1) * weight_size
            if blocking.across_images:
                scratch += plan.call_images * (plan.input.padded_features + plan.output.padded_features)
        return replace(super().plan_pass(pass_name, plan, machine, threads), blocking=blocking, scratch=scratch)

    def absorbs(self, following: Layer) -> bool:
        return isinstance(following, ReLU)

    def compute_forward(self, unit, x, y, step):
        relu = unit.plan.fused is not None
        kernels.conv2d_forward(
            x, unit.value["weight"], unit.value.get("bias"), y, self.stride, self.padding, relu,
            unit.plan.forward.blocking, unit.num_threads, unit.memory.scratch.get("forward"),
        )  # fmt: skip

    def compute_weight_grad(self, unit, dy):
        if unit.plan.fused:
            kernels.relu_input_grad(unit.y, dy, dy, unit.num_threads)
        kernels.conv2d_weight_grad(
            unit.x, dy, unit.grad["weight"], self.stride, self.padding, unit.memory.scratch.get("weight_grad"),
            unit.plan.weight_grad.blocking, unit.num_threads,
        )  # fmt: skip
        if self.bias:
            kernels.bias_grad(by_channel_block(dy), unit.grad["bias"], unit.num_threads)

    def compute_input_grad(self, unit, dy, dx):
        weight = unit.value["weight"]
        out_blocks, in_blocks, rows, columns, lanes, block = weight.shape
        scratch = unit.memory.scratch["input_grad"]
        weight_t = scratch[: weight.size].reshape(in_blocks, out_blocks, rows, columns, block, lanes)
        kernels.conv2d_transpose_filter(weight, weight_t, unit.num_threads)
        kernels.conv2d_input_grad(
            dy, weight_t, dx, self.stride, self.padding, unit.plan.input_grad.blocking, unit.num_threads,
            scratch[weight.size :],
        )  # fmt: skip

    def __str__(self) -> str:
        size = f"{self.kernel_size[0]}x{self.kernel_size[1]}"
        stride = "" if self.stride == (1, 1) else f" stride {self.stride[0]}x{self.stride[1]}"
        return f"Conv2d {size}{stride}"
