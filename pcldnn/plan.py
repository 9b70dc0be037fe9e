"""The plan: everything about a network's run that can be known before it runs.

`plan(...)` is a pure function of the layers, the input's shape, the minibatch and the number of ranks. Its result, a
`Plan`, holds for each layer what is computed and how (`LayerPlan`), which arrays live where in one arena (`Buffer`)
and which messages are sent in which order (`Message`). Printed, it is a table. Network executes it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import partial

from pcldnn.grid import (
    activation_messages,
    check_exact,
    choose_partition,
    image_shares,
    part_size,
    resolve_partitions,
)
from pcldnn.layers.base import PASSES, Layer, LayerPlan
from pcldnn.layers.conv import chosen_algorithm
from pcldnn.layout import FLOAT, UNPADDED_CHANNELS, Layout
from pcldnn.machine import Machine
from pcldnn.memory import Buffer, plan_buffers
from pcldnn.partition import Partition, shard_sizes
from pcldnn.plan_table import blocking_table, plan_table


@dataclass(frozen=True)
class Message:
    """One exchange of a layer between ranks.

    Of its flat array, between the ranks that hold the same part of the weights: "reduce_scatter" of gradients (the
    paper's part-reduce), "allgather" of weights (part-broadcast). Of activations, between the ranks of a group:
    "gather_inputs" and its adjoint "add_input_grads"; "to_images", outputs from slices of features of all images to
    all features of a rank's own, and its adjoint "to_slices".
    """

    kind: str
    index: int  # of the layer, as LayerPlan.index
    layer: str
    sizes: tuple[int, ...]  # [float32] owned by each of the ranks that take part; the largest that occur

    @property
    def bytes(self) -> int:
        """Size of the whole array [byte]."""
        return FLOAT * sum(self.sizes)


@dataclass(frozen=True)
class Plan:
    """A network's plan. Counts and shapes that it prints are logical; sizes in memory include padded lanes."""

    input: Layout
    layers: tuple[LayerPlan, ...]
    minibatch: int  # global
    ranks: int
    images: int  # most images of a rank in a step
    threads: int
    machine: Machine
    training: bool
    buffers: tuple[Buffer, ...]
    messages: tuple[Message, ...]  # of a step, in the order that all ranks keep
    pieces: int = 0  # of a minibatch, in exact mode; else 0

    @property
    def output(self) -> Layout:
        return self.layers[-1].output

    @property
    def parameter_count(self) -> int:
        """Numbers that are learnt, logical."""
        return sum(layer.parameter_count for layer in self.layers)

    @property
    def algorithms(self) -> dict[str, dict[str, str]]:
        """The algorithm of each pass of each layer that computes."""
        return {layer.name: layer.algorithms for layer in self.layers if layer.forward.flop}

    @property
    def tuned(self) -> dict[str, dict[str, str]]:
        """Those of these that were found by timing (`tuning.py`); empty when the model chose."""
        return {layer.name: dict(layer.tuned) for layer in self.layers if layer.tuned}

    @property
    def arena_size(self) -> int:
        """Memory for all buffers [float32]."""
        return max(buffer.offset + buffer.size for buffer in self.buffers)

    @property
    def memory(self) -> dict[str, int]:
        """What a rank needs at most [byte]."""
        parameters = FLOAT * sum(part_size(layer) for layer in self.layers)
        owned = FLOAT * sum(self.shards(layer)[0] for layer in self.layers)
        arena = FLOAT * self.arena_size
        if not self.training:
            return {"parameters": parameters, "activations and scratch": arena}
        return {
            "parameters": parameters,
            "gradients": parameters,
            "momentum of the owned shard": owned,
            "activations and scratch": arena,
        }

    def flop(self, *passes: str) -> int:
        """Work [flop] of one image in the given passes (default: all that are made)."""
        plans = [getattr(layer, name) for layer in self.layers for name in passes or PASSES]
        return sum(made.flop for made in plans if made) // self.images

    def shards(self, layer: LayerPlan, member: int = 0) -> tuple[int, ...]:
        """Elements of a member's flat array that each of the ranks that have it owns: sums, updates and sends."""
        return shard_sizes(part_size(layer, member), layer.partition.data, self.machine.width)

    @property
    def split_layers(self) -> tuple[LayerPlan, ...]:
        """Layers whose outputs ranks share."""
        return tuple(layer for layer in self.layers if layer.partition.model > 1)

    def step_counts(self, rank: int, count: int, total: int) -> tuple[int, ...]:
        """Images of each rank in a step of `total` images on all ranks, `count` of which `rank` brings.

        ValueError when that is no step of this plan. Where ranks work on each other's images, the rule must hold.
        """
        if count > self.images or total < max(count, 1):
            raise ValueError(
                f"images: got {count} in a step of global_count {total}, wanted at most {self.images} "
                f"(prepared for a minibatch of {self.minibatch} on {self.ranks} ranks)"
            )
        counts = image_shares(total, self.ranks, self.pieces)
        if (self.pieces or self.split_layers) and count != counts[rank]:
            raise ValueError(
                f"images: got {count} in a step of global_count {total} on rank {rank} of {self.ranks}, wanted "
                f"{counts[rank]} as grid.image_shares has it, since a layer is split or sums are exact "
                "(partitions={'conv': Partition(ranks, 1), 'fc': Partition(ranks, 1)} splits none)"
            )
        return counts

    def description(self) -> dict[str, str]:
        """Everything that all ranks must agree upon, item by item in words."""
        items = {
            "SIMD width": str(self.machine.width),
            "ranks": str(self.ranks),
            "minibatch": str(self.minibatch),
            "input shape": str(self.input.logical_shape),
        }
        for layer in self.layers:
            shapes = ", ".join(f"{parameter.name} {parameter.shape}" for parameter in layer.parameters)
            algorithms = "/".join(layer.algorithms.values())
            fused = "".join(f" + {other!r}" for other in (layer.fused, layer.pooled) if other)
            if self.pieces:
                algorithms += f", {self.pieces} pieces"
            items[f"layer {layer.name}"] = f"{layer.layer!r}{fused} {shapes} [{layer.partition}, {algorithms}]"
        if self.pieces:  # they decide blocking, and that the order of sums
            items["caches"] = f"{self.machine.l1}, {self.machine.l2}, {self.machine.l3}"
        items["messages"] = hashlib.sha256(repr(self.messages).encode()).hexdigest()[:16]
        return items

    def digest(self) -> str:
        """SHA-256 of the description, hexadecimal."""
        return hashlib.sha256(json.dumps(self.description()).encode()).hexdigest()

    def blocking_table(self) -> str:
        """What the solver chose for each pass that computes, and what that moves, beside the machine's balance.

        The machine must have rates (`Machine.measured`).
        """
        return blocking_table(self)

    def __str__(self) -> str:
        return plan_table(self)


# --- making a plan ----------------------------------------------------------------------------------------------


def name_layers(layers) -> tuple[tuple[str, Layer], ...]:
    """Pairs (name, layer) from a list of layers or of such pairs.

    Layers without a name get the one that PyTorch's model zoo would give: `features.i` before the first Flatten and
    `classifier.i` after it, counted from 0 each; in a network without Flatten just `i`.
    """
    layers = [entry if isinstance(entry, tuple) else (None, entry) for entry in layers]
    if not layers:
        raise ValueError("layers: got none, wanted at least one")
    flatten = next((i for i, (_, layer) in enumerate(layers) if getattr(layer, "aliasing", "") == "view"), None)
    named = []
    for i, (name, layer) in enumerate(layers):
        if not isinstance(layer, Layer):
            raise TypeError(f"layers[{i}]: got {layer!r}, wanted a pcldnn layer")
        if name is None and flatten is None:
            name = str(i)
        elif name is None:
            name = f"features.{i}" if i < flatten else f"classifier.{i - flatten - 1}" if i > flatten else "flatten"
        named.append((name, layer))
    names = [name for name, _ in named]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise ValueError(f"layers: the name {twice!r} is used twice")
    return tuple(named)


def input_layout(layers, input_shape, block: int) -> Layout:
    """Layout in which a network's input arrives: few channels stay unpadded if the first layer can read that."""
    shape = tuple(input_shape)
    if len(shape) not in (1, 3) or not all(isinstance(size, int) and size >= 1 for size in shape):
        raise ValueError(f"input_shape: got {input_shape!r}, wanted (channels, height, width) or (features,)")
    reader = next((layer for _, layer in layers if layer.aliasing != "view"), None)
    if shape[0] <= UNPADDED_CHANNELS and reader is not None and reader.takes_unpadded:
        block = shape[0]
    return Layout(shape, block) if len(shape) == 3 else Layout.vector(*shape, block)


def plan(layers, input_shape, minibatch: int, ranks: int = 1, *, threads: int = 1, training: bool = True,
         machine: Machine | None = None, algorithm: str | None = None, tuned: dict[str, dict[str, str]] | None = None,
         partitions: dict[str, Partition] | None = None, exact: bool | int = False) -> Plan:  # fmt: skip
    """Plan a network's run.

    Parameters
    ----------
    layers : list of Layer or of (name, Layer)
    input_shape : (C, H, W) or (F,)
    minibatch : int
        Images a step on all ranks together.
    ranks : int
    threads : int
        Of each rank.
    training : bool
        False: forward passes only, and activations are not kept.
    machine : Machine, optional
        Its SIMD width and caches; by default this one.
    algorithm : "auto", "direct" or "winograd", optional
        Of convolutions. By default what the environment variable PCLDNN_CONV says, else "auto": each pass of each
        layer is computed the way that `winograd_blocking.py` finds faster. "winograd" means: wherever it can be.
    tuned : dict of str to dict of str to str, optional
        Algorithms by layer and pass, as `Plan.tuned` has them, in the place of the model's choice: what
        `tuning.quicker` has timed. Nothing unless `algorithm` is "auto".
    partitions : dict of str to Partition, optional
        Grids of layers, by name or nickname (`grid.resolve_partitions`). Layers that are not named get the grid that
        sends least in training (`grid.choose_partition`).
    exact : bool or int
        Make every sum independent of ranks, threads and partitions (`grid`): True, or the number of pieces, a power
        of two, into which minibatches are cut. More ranks than pieces leave some without work.

    Raises
    ------
    ValueError
        When a layer cannot take its input, with the layer's name and the numbers.
    """
    for name, value in (("minibatch", minibatch), ("ranks", ranks), ("threads", threads)):
        if value < 1:
            raise ValueError(f"{name}: got {value}, wanted at least 1")
    machine = machine or Machine.detect()
    named = name_layers(layers)
    given = resolve_partitions(named, partitions, ranks)
    tuned = _check_tuned(named, tuned or {}) if chosen_algorithm(algorithm) == "auto" else {}
    pieces = check_exact(exact, machine.target) if training else 0
    images = max(image_shares(minibatch, ranks, pieces))
    piece_images = image_shares(minibatch, pieces)[0] if pieces else 0
    first = layout = input_layout(named, input_shape, machine.width)
    planned: list[LayerPlan] = []
    index = 0
    while index < len(named):
        name, layer = named[index]
        following = named[index + 1][1] if index + 1 < len(named) else None
        fused = following if following is not None and layer.absorbs(following) else None
        make = partial(
            layer.plan, layout, images, machine, threads, index=index, name=name, fused=fused, algorithm=algorithm,
            tuned=tuned.get(name), training=training, input_grad=any(before.parameters for before in planned),
            pieces=pieces, piece_images=piece_images,
            relu_input=layer.masks and training and bool(planned and planned[-1].fused and not planned[-1].pooled),
        )  # fmt: skip
        made = make(partition=given.get(name, Partition(data=ranks)))
        if training and name not in given:
            chosen = choose_partition(made, minibatch)
            made = made if chosen == made.partition else make(partition=chosen)
        pool = named[index + 2][1] if fused and index + 2 < len(named) else None
        if pool is not None and layer.pools(made, pool):
            made = make(partition=made.partition, pooled=pool)
        if made.relu_input:
            planned[-1] = replace(planned[-1], masked=True)
        planned.append(made)
        layout = made.output
        index += 1 + bool(fused) + bool(made.pooled)
    return Plan(
        first, tuple(planned), minibatch, ranks, images, threads, machine, training, plan_buffers(planned, training),
        _messages(planned, minibatch, machine.width) if training else (), pieces,
    )  # fmt: skip


def _check_tuned(named, tuned: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """The same; ValueError when there is no such layer, pass or algorithm."""
    names = [name for name, _ in named]
    for name, passes in tuned.items():
        if name not in names or not set(passes) <= set(PASSES):
            raise ValueError(f"tuned: got {name!r}: {passes!r}, wanted layers of {names} and passes of {PASSES}")
        for algorithm in passes.values():
            chosen_algorithm(algorithm)
    return tuned


def _messages(layers: list[LayerPlan], minibatch: int, vector: int) -> tuple[Message, ...]:
    """Activations with their passes; gradients to owners as backward produces them; weights for the next forward."""
    order = []
    activations = {}
    for layer in layers:
        partition = layer.partition
        counts = image_shares(minibatch, partition.ranks, layer.pieces)[: partition.model]
        activations[layer.name] = kinds = activation_messages(layer, counts)
        order += [(kind, layer, kinds[kind]) for kind in ("gather_inputs", "to_images") if kind in kinds]
    learning = [layer for layer in layers if layer.parameters]
    owned = {layer.name: shard_sizes(part_size(layer), layer.partition.data, vector) for layer in learning}
    exchanged = [layer for layer in learning if layer.partition.data > 1]
    for layer in reversed(learning):
        kinds = activations[layer.name]
        order += [("to_slices", layer, kinds["to_slices"])] if kinds else []
        order += [("reduce_scatter", layer, owned[layer.name])] if layer in exchanged else []
        order += [("add_input_grads", layer, kinds["add_input_grads"])] if kinds and layer.input_grad else []
    order += [("allgather", layer, owned[layer.name]) for layer in exchanged]
    return tuple(Message(kind, layer.index, layer.name, sizes) for kind, layer, sizes in order)
