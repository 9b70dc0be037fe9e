"""Layers at run time on a grid of ranks: where their weights are, and how their passes are made together.

`Placement` is the place of one layer on the grid, for one rank. `ExactUnit` makes a layer's sums in tree order, and
`SplitUnit` is a layer of which each member of a group computes a slice; see grid.py for both ideas. To Network all
are a `Unit`.
"""

from __future__ import annotations

import numpy as np

from pcldnn.exchange import Tree, add_rows, gather_rows, reduce_trees, sum_leaves, to_images, to_slices
from pcldnn.grid import activation_messages, image_leaves, member_part, output_cuts, output_leaves
from pcldnn.layers.base import LayerPlan, Memory, StepContext, Unit, by_image
from pcldnn.layout import FLOAT, aligned_zeros
from pcldnn.partition import bounds, shard_sizes, shares
from pcldnn.transfer import piece_spans


class Placement:
    """The place of a layer on the ranks: this rank's part of its parameters, and the shard of it that it owns.

    Attributes
    ----------
    layer, part : LayerPlan
        Of the whole layer, and of this member's slice (the same when nothing is split).
    data, model : communicators
        See `Communicator.grid`.
    shards : tuple of int
        Elements of the part's flat array that each rank of `data` owns.
    own : slice
        This rank's.
    travel : callable
        ``travel(kind, bytes, function, *arguments)`` makes an exchange of activations. The call itself, unless somebody
        who keeps a record of them sets another one.
    """

    def __init__(self, layer: LayerPlan, communicator):
        self.layer = layer
        self.data, self.model = communicator.grid(layer.partition)
        self.group, self.member = layer.partition.place(communicator.rank)
        self.cuts = output_cuts(layer)
        self.part = member_part(layer, self.member)
        self.shards = shard_sizes(self.part.parameter_size, layer.partition.data, layer.output.block)
        self.own = slice(*bounds(self.shards, self.group))
        self.travel = lambda kind, size, function, *arguments: function(*arguments)

    @property
    def is_split(self) -> bool:
        """Whether this rank has only a part of the parameters."""
        return self.model.size > 1

    def cut(self, whole: np.ndarray) -> np.ndarray:
        """This member's part of the flat array of all parameters; a copy if it is not all of it."""
        if not self.is_split:
            return whole
        flat = aligned_zeros(self.part.parameter_size)
        views, wholes = self.part.views(flat), self.layer.views(whole)
        for parameter, rows in zip(self.layer.parameters, self._rows()):
            views[parameter.name].reshape(-1)[:] = wholes[parameter.name].reshape(-1)[slice(*bounds(rows, self.member))]
        return flat

    def gather(self, flat: np.ndarray) -> np.ndarray:
        """Inverse of `cut`; collective, if the layer is split."""
        if not self.is_split:
            return flat
        whole = aligned_zeros(self.layer.parameter_size)
        views, wholes = self.part.views(flat), self.layer.views(whole)
        for parameter, rows in zip(self.layer.parameters, self._rows()):
            target = wholes[parameter.name].reshape(-1)
            target[slice(*bounds(rows, self.member))] = views[parameter.name].reshape(-1)
            self.model.allgather(target, rows)
        return whole

    def _rows(self) -> list[list[int]]:
        """Of each parameter's array, the elements that each member has."""
        outputs = sum(self.cuts)
        return [[cut * (parameter.array_size // outputs) for cut in self.cuts] for parameter in self.layer.parameters]

    def gather_shard(self, shard: np.ndarray) -> np.ndarray:
        """Flat array of the whole layer from what each rank has of its owned shard; collective."""
        flat = aligned_zeros(self.part.parameter_size)
        flat[self.own] = shard
        self.data.allgather(flat, self.shards)
        return self.gather(flat)

    def cut_shard(self, whole: np.ndarray) -> np.ndarray:
        """Inverse of `gather_shard`, a copy."""
        return self.cut(whole)[self.own].copy()

    def unit(self, memory: Memory, threads: int) -> Unit:
        """The layer at run time. `memory` has what `grid.grid_arrays` lists in its scratch, by role."""
        kind = ExactUnit if self.layer.pieces else Unit
        if not self.is_split:
            unit = kind(self.layer, memory, threads)
        else:
            images, scratch = self.layer.group_images, memory.scratch
            inner = Memory(
                output=_shaped(scratch["slice output"], self.part.output, images),
                input_grad=_shaped(scratch.get("group input_grad"), self.layer.input, images),
                parameters=memory.parameters, gradients=memory.gradients, scratch=scratch,
            )  # fmt: skip
            unit = SplitUnit(self, kind(self.part, inner, threads), memory)
        if self.layer.pieces:
            inner = unit.inner if self.is_split else unit
            inner.image_leaves = range(*image_leaves(self.layer)[self.group])
            inner.output_leaves = range(*output_leaves(self.layer)[self.member])
            inner.output_pieces = shares(self.layer.output.channel_blocks, self.layer.pieces)
        return unit


class ExactUnit(Unit):
    """A Unit that adds in tree order; what it computes alone are partial sums.

    Attributes
    ----------
    image_leaves, output_leaves : range
        The pieces of the minibatch and of the outputs that are this rank's.
    output_pieces : sequence of int
        Output blocks of each piece.
    """

    sums, counts = (), ()  # of the last weight gradient: partial sums, and images of each piece

    def weight_grad(self, dy: np.ndarray) -> None:
        """Partial sums of gradients; their `tree` completes them."""
        x, y, first = self.x, self.y, self.image_leaves.start
        counts = self.counts = self.step.piece_counts

        def leaf(piece, flat):
            rows = slice(sum(counts[first:piece]), sum(counts[first : piece + 1]))
            self.x, self.y, self.grad = x[rows], y[rows], self.plan.views(flat)
            self.plan.layer.compute_weight_grad(self, dy[rows])

        self.sums = []
        if self.gradients.size:  # a member of a group may have no output at all
            buffers = [self.gradients, *self._buffers("weight_grad sums", self.gradients.size)]
            self.sums = sum_leaves(self.image_leaves, counts, leaf, buffers)
        if all(array is None for _, array in self.sums):
            self.gradients[...] = 0
        self.x, self.y, self.grad = x, y, self.plan.views(self.gradients)

    def tree(self, placement: Placement, spans) -> Tree:
        """Spans of the gradients, of each rank that shares them, from the partial sums of all."""
        own = self.gradients[slice(*spans[placement.group])]
        return Tree(self.sums, image_leaves(placement.layer), self.counts, spans, own)

    def input_grad(self, dy: np.ndarray) -> np.ndarray:
        if not self.plan.layer.splittable:
            return super().input_grad(dy)
        self.input_sums(dy)
        return self.memory.input_grad[: len(dy)]

    def input_sums(self, dy: np.ndarray):
        """Partial sums of the gradient of the input, flat; one that covers all outputs is in its own memory."""
        if not len(dy):
            return []
        shape = self.memory.input_grad[: len(dy)].shape
        rows, width, first = by_image(dy), self.plan.output.block_features, self.output_leaves.start

        def leaf(piece, flat):
            start, stop = (sum(self.output_pieces[first:end]) for end in (piece, piece + 1))
            columns = self.memory.scratch["input_grad columns"][: len(dy) * (stop - start) * width]
            columns = columns.reshape(len(dy), stop - start, *dy.shape[2:])
            by_image(columns)[...] = rows[:, start * width : stop * width]
            self.plan.layer.compute_input_grad_of(self, columns, flat.reshape(shape), start, stop)

        size = int(np.prod(shape))
        buffers = [self.memory.input_grad.reshape(-1)[:size], *self._buffers("input_grad sums", size)]
        return sum_leaves(self.output_leaves, self.output_pieces, leaf, buffers)

    def _buffers(self, role: str, size: int) -> list[np.ndarray]:
        memory = self.memory.scratch.get(role, ())
        return [memory[i : i + size] for i in range(0, len(memory) - size + 1, size)]


class SplitUnit:
    """A layer of which each member of a group computes a slice of the outputs; a Unit from outside."""

    def __init__(self, placement: Placement, inner: Unit, memory: Memory):
        self.placement, self.inner, self.memory = placement, inner, memory
        self.plan, self.name = placement.layer, placement.layer.name
        self.group_input = _shaped(memory.scratch["group input"], self.plan.input, self.plan.group_images)
        slice_grad = memory.scratch.get("slice output_grad")
        self.slice_grad = _shaped(slice_grad, placement.part.output, self.plan.group_images)
        self.widths = [cut * self.plan.output.block_features for cut in placement.cuts]
        self.counts = ()  # images of each member in the last forward pass

    @property
    def parameters(self) -> np.ndarray:
        return self.inner.parameters

    @property
    def gradients(self) -> np.ndarray:
        return self.inner.gradients

    def forward(self, x: np.ndarray, step: StepContext) -> np.ndarray:
        ranks = self.plan.partition.group(self.placement.group)
        self.counts = step.counts[ranks.start : ranks.stop]
        rows = self.group_input[: sum(self.counts)]
        self._travel("gather_inputs", gather_rows, x, self.counts, rows)
        columns = by_image(self.inner.forward(rows, step))
        y = self.memory.output[: len(x)]
        self._travel("to_images", to_images, columns, self.counts, self.widths, by_image(y), self._staging("forward"))
        return y

    def weight_grad(self, dy: np.ndarray) -> None:
        columns = by_image(self._slice_grad())
        staging = self._staging("weight_grad")
        self._travel("to_slices", to_slices, by_image(dy), self.counts, self.widths, columns, staging)
        self.inner.weight_grad(self._slice_grad())

    def input_grad(self, dy: np.ndarray) -> np.ndarray:
        dx = self.memory.input_grad[: len(dy)]
        if not self.plan.pieces:
            self._travel("add_input_grads", add_rows, self.inner.input_grad(self._slice_grad()), self.counts, dx)
            return dx
        sums = self.inner.input_sums(self._slice_grad())
        sizes = [count * self.plan.input.padded_features for count in self.counts]
        spans, leaves = piece_spans(sizes), output_leaves(self.plan)
        tree = Tree(sums, leaves, self.inner.output_pieces, spans, dx.reshape(-1))
        self._travel("add_input_grads", reduce_trees, [tree], self.memory.scratch.get("input_grad arrivals"))
        return dx

    def tree(self, placement: Placement, spans) -> Tree:
        return self.inner.tree(placement, spans)

    def _travel(self, kind: str, function, *arguments) -> None:
        """An exchange of activations between the members of the group."""
        size = FLOAT * sum(activation_messages(self.plan, self.counts)[kind])
        self.placement.travel(kind, size, function, self.placement.model, *arguments)

    def _slice_grad(self) -> np.ndarray:
        return self.slice_grad[: sum(self.counts)]

    def _staging(self, pass_name: str) -> np.ndarray:
        return self.memory.scratch[f"{pass_name} staging"]


def _shaped(flat: np.ndarray | None, layout, images: int) -> np.ndarray | None:
    """Activations of `layout` in the leading part of a flat array."""
    if flat is None:
        return None
    shape = layout.array_shape(images)
    return flat[: int(np.prod(shape))].reshape(shape)
