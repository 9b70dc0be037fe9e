"""What is measured: the layers of the paper's three networks, under the names that results go by.

A `Layer` here is one place in a network: its LayerPlan comes from `Network.plan`, so it has the blocking and the
algorithm that training uses. A `Row` is one line of the results: a layer, a pass, a minibatch, and who computes it.
"""

from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import lru_cache

import numpy as np

from pcldnn import Network, _kernels, models
from pcldnn.layers import AvgPool2d, Conv2d, Flatten, Linear, MaxPool2d, ReLU
from pcldnn.layers.base import PASSES, LayerPlan
from pcldnn.layout import aligned_zeros
from pcldnn.machine import Machine


def tiny() -> Network:
    """A network to try the benchmarks themselves with, in a second."""
    images = [Conv2d(3, 8, 3, padding=1), ReLU(), MaxPool2d(2), Conv2d(8, 16, 3, padding=1), ReLU(), MaxPool2d(2)]
    return Network([*images, Flatten(), Linear(64, 16), ReLU(), Linear(16, 10)], (3, 8, 8))


def digits() -> Network:
    """VGG-A as `train_vgg.py` trains it by default."""
    return models.vgg_a(num_classes=10, input_shape=(1, 32, 32))


NETWORKS = {**models.NETWORKS, "digits": digits, "tiny": tiny}
KINDS = {Conv2d: "conv", Linear: "fc", MaxPool2d: "pool", AvgPool2d: "pool"}

# Images when --minibatch does not say: convolutions as few as a rank of many gets, pooling enough to leave
# the caches, fully connected layers at the two ends of what a rank gets.
MINIBATCHES = {"conv": (8,), "stage": (32,), "pool": (32,), "fc": (64, 256)}
STEP_MINIBATCHES = {"vgg_a": 32, "overfeat_fast": 32, "cd_dnn": 1024, "digits": 64, "tiny": 4}


@dataclass(frozen=True)
class Row:
    """One line of the results."""

    net: str
    layer: str  # "conv1", "pool1", "stage1" for both in one, "fc6", ...; "all" for a training step
    pass_name: str
    minibatch: int
    by: str  # a target of ours, "torch", or "onednn": what oneDNN's primitives take inside PyTorch
    algorithm: str | None = None  # of our convolution; None: the plan's choice

    @property
    def name(self) -> str:
        return "-".join([*self.group.split(" "), self.by, *([self.algorithm] if self.algorithm else [])])

    @property
    def group(self) -> str:
        """What rows that compete have in common."""
        return f"{self.net} {self.layer} {self.pass_name} n{self.minibatch}"

    @property
    def kind(self) -> str:
        return self.layer.rstrip("0123456789")


@lru_cache
def outline(net: str) -> Network:
    """A network to be asked for plans. Never prepared, so it holds no arrays."""
    return NETWORKS[net]()


def layers(net: str, minibatch: int = 1, threads: int = 1, algorithm: str | None = None) -> dict[str, LayerPlan]:
    """The plans of a network's convolutions, pooling and fully connected layers, by name.

    Convolutions and pooling layers count from 1. Fully connected layers go on at 6 after convolutions: both networks
    have five stages of them. A first convolution that pools on the way is there as "stage1", and apart from its
    pooling.
    """
    plans = list(outline(net).plan(minibatch, threads=threads, algorithm=algorithm).layers)
    named = {}
    if plans[0].pooled:
        named["stage1"] = first = plans[0]
        alone = first.layer.plan(first.input, first.images, Machine.detect(), threads, name=first.name,
                                 fused=first.fused, input_grad=False)  # fmt: skip
        pool = first.pooled.plan(alone.output, first.images, Machine.detect(), threads, relu_input=True)
        plans[:1] = alone, pool
    counts = {"conv": 0, "pool": 0, "fc": 5 if any(isinstance(plan.layer, Conv2d) for plan in plans) else 0}
    for plan in plans:
        kind = KINDS.get(type(plan.layer))
        if kind:
            counts[kind] += 1
            named[f"{kind}{counts[kind]}"] = plan
    return named


def layer_plan(row: Row, threads: int) -> LayerPlan:
    """The plan of a layer whose pass is measured by itself, as a library's primitive computes it.

    Forward is with bias; the activation behind it is left out. The weight gradient is that of the weights only, for
    the gradient of the bias is another pass over the data, and bound by memory. A stage is measured as a network has
    it: with ReLU and pooling, and with the gradients of both and of the bias before that of the weights.
    """
    plan = layers(row.net, row.minibatch, threads, row.algorithm)[row.layer]
    if row.kind == "stage":
        return plan
    plan = replace(plan, fused=None)
    if row.pass_name == "weight_grad":
        plan = replace(plan, layer=replace(plan.layer, bias=False), parameters=plan.parameters[:1])
    return plan


def passes(plan: LayerPlan) -> list[str]:
    """The passes of a layer that training makes: the first layer of a network has no input gradient."""
    return [name for name in PASSES if getattr(plan, name)]


def algorithms(options, net: str, layer: str, pass_name: str, who: str) -> list[str | None]:
    """Ways in which `who` computes a pass: our convolutions in all that were asked for and can be, once each.

    The NumPy twin is there for direct convolution, with which everything is compared.
    """
    if not layer.startswith("conv") or who not in _kernels.targets:
        return [None]
    if who == "reference":
        return ["direct"]
    ways = {getattr(layers(net, algorithm=way)[layer], pass_name).algorithm: way for way in options.algorithms[::-1]}
    return [way for way in options.algorithms if way in ways.values()]


def layer_rows(options) -> list[Row]:
    """Every layer in every pass, those who compute the same one after the other."""
    rows = []
    for net in options.nets:
        for layer, plan in layers(net).items():
            if not any(fnmatch(layer, pattern) for pattern in options.layers):
                continue
            wanted = [name for name in passes(plan) if name in options.passes]
            minibatches = options.minibatch or MINIBATCHES[layer.rstrip("0123456789")]
            by = [*options.targets, *(["torch"] if options.peer else [])]
            if options.peer and not layer.startswith(("pool", "stage")):
                by.append("onednn")
            rows += [
                Row(net, layer, name, n, who, way)
                for n in minibatches for name in wanted for who in by
                for way in algorithms(options, net, layer, name, who)
            ]  # fmt: skip
    return rows


@dataclass(frozen=True)
class Turns(Row):
    """A pass by Winograd, and directly before each round."""

    @property
    def group(self) -> str:
        return super().group + " turns"


TURNS_MINIBATCHES = {"vgg_a": (8, 32), "overfeat_fast": (8, 32), "digits": (16, 32, 64), "tiny": (2,)}


def turns_rows(options) -> list[Turns]:
    """Every pass of every convolution for which the plan chooses Winograd; of the tiny network, which can be."""
    rows = []
    for net in options.nets:
        for n in (options.minibatch or TURNS_MINIBATCHES.get(net, ())):
            for layer, plan in layers(net, n, options.threads, "winograd" if net == "tiny" else None).items():
                rows += [
                    Turns(net, layer, name, n, _kernels.TARGET, "winograd")
                    for name, way in plan.algorithms.items()
                    if way == "winograd" and name in options.passes
                    and any(fnmatch(layer, pattern) for pattern in options.layers)
                ]  # fmt: skip
    return rows


def step_rows(options) -> list[Row]:
    """The whole training step of each network."""
    if "step" not in options.passes:
        return []
    by = [*options.targets, *(["torch"] if options.peer else [])]
    return [
        Row(net, "all", "step", n, who)
        for net in options.nets
        for n in (options.minibatch or (STEP_MINIBATCHES[net],))
        for who in by
    ]


def filled(shape) -> np.ndarray:
    """A float32 array of normal numbers, repeated after a while: quicker to make than all new ones."""
    array = aligned_zeros(tuple(shape))
    few = np.random.default_rng(0).standard_normal(min(array.size, 1_000_003), np.float32)
    flat = array.reshape(-1)
    for start in range(0, flat.size, few.size or 1):
        part = flat[start : start + few.size]
        part[...] = few[: part.size]
    return array
