"""Fully connected layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pcldnn import _kernels as kernels
from pcldnn import balance
from pcldnn import blocking as solver
from pcldnn.layers.activation import ReLU
from pcldnn.layers.base import Layer, by_image, called_blocks, mask_and_sum, per_rank
from pcldnn.layers.parameter import Bias, Parameter
from pcldnn.layout import Layout, blocks, linear_from_blocked, linear_to_blocked


@dataclass(frozen=True)
class LinearWeight(Parameter):
    """Weights (out_features, in_features), the columns in the logical order of `input`."""

    input: Layout

    def to_blocked(self, logical):
        return linear_to_blocked(logical, self.input, self.array_shape[-1])

    def from_blocked(self, blocked):
        return linear_from_blocked(blocked, self.input, self.shape[0])


@dataclass(frozen=True)
class Linear(Layer):
    """Fully connected layer, `y = x weight^T + bias`, on vectors: put a Flatten after images.

    Parameters
    ----------
    in_features, out_features : int
    bias : bool
    """

    in_features: int
    out_features: int
    bias: bool = True

    saves = frozenset({"input"})
    takes_unpadded = True
    splittable = True
    nickname = "fc"

    def __post_init__(self):
        if self.in_features < 1 or self.out_features < 1:
            raise ValueError(f"Linear: got {self.in_features} to {self.out_features} features, wanted at least 1")

    def output_layout(self, input: Layout, block: int) -> Layout:
        if not input.flat:
            raise ValueError(f"the input is an image of shape {input.shape}, wanted a vector: put Flatten before it")
        if input.features != self.in_features:
            raise ValueError(
                f"the input has {input.features} features (from channels, height, width {input.shape}), "
                f"wanted in_features = {self.in_features}"
            )
        return Layout.vector(self.out_features, block)

    def parameters(self, input: Layout, block: int) -> tuple[Parameter, ...]:
        array_shape = (blocks(self.out_features, block), input.padded_features, block)
        weight = LinearWeight("weight", (self.out_features, self.in_features), array_shape, input)
        return (weight, Bias.of(self.out_features, block)) if self.bias else (weight,)

    def multiply_adds(self, input: Layout, output: Layout) -> int:
        return self.in_features * self.out_features

    def plan_pass(self, pass_name, plan, machine, threads):
        images, features, vectors = plan.group_images, plan.input.padded_features, called_blocks(pass_name, plan)
        outputs = vectors * plan.output.block
        if pass_name == "input_grad":
            blocking = solver.linear_input_grad(images, features, machine, threads)
            traffic = balance.linear_input_grad_traffic(images, features, outputs, machine, blocking)
        else:
            summed, tiled = (features, images) if pass_name == "forward" else (images, features)
            blocking = solver.linear(summed, tiled, vectors, machine, threads)
            traffic = balance.linear_traffic(summed, tiled, vectors, machine, blocking, pass_name == "weight_grad")
        return replace(
            super().plan_pass(pass_name, plan, machine, threads), blocking=blocking,
            traffic=per_rank(traffic, pass_name, plan), scratch=kernels.linear_scratch_size(images, features, outputs),
        )  # fmt: skip

    def absorbs(self, following: Layer) -> bool:
        return isinstance(following, ReLU)

    def compute_forward(self, unit, x, y, step):
        relu = unit.plan.fused is not None
        kernels.linear_forward(
            by_image(x), unit.value["weight"], unit.value.get("bias"), by_image(y), relu,
            unit.memory.scratch.get("forward"), unit.plan.forward.blocking, unit.num_threads,
        )  # fmt: skip

    def compute_weight_grad(self, unit, dy):
        mask_and_sum(unit, dy)
        kernels.linear_weight_grad(
            by_image(unit.x), by_image(dy), unit.grad["weight"],
            unit.memory.scratch.get("weight_grad"), unit.plan.weight_grad.blocking, unit.num_threads,
        )  # fmt: skip

    def compute_input_grad(self, unit, dy, dx):
        self.compute_input_grad_of(unit, dy, dx, 0, len(unit.value["weight"]))

    def compute_input_grad_of(self, unit, dy, dx, start, stop):
        if start == stop:
            dx[...] = 0
            return
        kernels.linear_input_grad(
            by_image(dy), unit.value["weight"][start:stop], by_image(dx),
            unit.memory.scratch.get("input_grad"), unit.plan.input_grad.blocking, unit.num_threads,
        )  # fmt: skip
