"""The passes of a network, as planned: the one place where kernels and messages interleave.

The arrays of a Plan are allocated, once, and the calls of its layers are made, between the exchanges that `Overlap`
has under way. Arguments have been checked by Network, which says what each pass does.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from pcldnn.layers.base import PASSES, Memory, StepContext, Unit, share_pixel_sums
from pcldnn.layout import aligned_zeros, block
from pcldnn.overlap import Overlap
from pcldnn.partition import bounds
from pcldnn.plan import Plan
from pcldnn.trace import clock
from pcldnn.units import Placement


class Passes:
    """A plan at run time. To make one is collective, if it is for training.

    Parameters
    ----------
    plan : Plan
    parameters : dict of str to ndarray
        The flat, blocked array of each layer that has weights. In training on several ranks they are moved, in this
        dict, to memory from which exchanges are fast.
    placements : dict of str to Placement
        Of the same layers.
    communicator : Communicator
    trace : Trace, optional
        Calls and waits are added to it.

    Attributes
    ----------
    units : list of Unit
        One a planned layer.
    overlap : Overlap or None
        Exchanges under way, in training on several ranks.
    step : StepContext or None
        Of the forward pass that backward would belong to.
    """

    def __init__(self, plan: Plan, parameters: dict[str, np.ndarray], placements: dict[str, Placement], communicator,
                 trace=None):  # fmt: skip
        self.plan, self.trace = plan, trace
        self._parameters, self._placements, self._communicator = parameters, placements, communicator
        self.units: list[Unit] = []
        self.overlap: Overlap | None = None
        self.step: StepContext | None = None
        self._allocate()

    def _allocate(self) -> None:
        new = self.plan
        arena = self.arena = aligned_zeros(new.arena_size)
        arrays = {
            role: arena[buffer.offset : buffer.offset + buffer.size]
            for buffer in new.buffers
            for role in buffer.roles
        }

        def array(name, role, layout):
            flat = arrays.get((name, role))
            return None if flat is None else flat.reshape(layout.array_shape(new.images))

        self._input = array("input", "output", new.input)
        self._output_grad = array("loss", "input_grad", new.output)
        self._losses = np.zeros(new.images)
        if new.training:
            self._share()
        for layer in new.layers:
            placement = self._placements.get(layer.name)
            scratch = dict.fromkeys(PASSES) | {
                role.removesuffix(" scratch"): flat
                for (name, role), flat in arrays.items()
                if name == layer.name and role not in ("output", "input_grad")
            }
            memory = Memory(
                output=array(layer.name, "output", layer.output),
                input_grad=array(layer.name, "input_grad", layer.input),
                parameters=self._parameters.get(layer.name),
                gradients=placement.data.allocate(placement.part.parameter_size) if layer.weight_grad else None,
                scratch=scratch,
            )
            self.units.append(placement.unit(memory, new.threads) if placement else Unit(layer, memory, new.threads))
            if layer.relu_input and not new.pieces:  # exact sums are of pieces of the minibatch
                share_pixel_sums(*self.units[-2:])
        if new.training and new.ranks > 1:
            bandwidth = self._communicator.bandwidth() if self._communicator.has_thread else float("inf")
            self.overlap = Overlap(new, self.units, self._placements, self._communicator, bandwidth, self.trace)

    def _share(self) -> None:
        """Move the weights to memory from which exchanges between ranks are fast; collective."""
        for name, values in self._parameters.items():
            data = self._placements[name].data
            if data.size > 1:
                self._parameters[name] = data.allocate(values.size)
                self._parameters[name][:] = values

    def forward(self, images: np.ndarray, step: StepContext) -> np.ndarray:
        """Blocked output for logical images."""
        start = clock()
        x = block(images, self.plan.input, self._input[: len(images)], self.plan.threads)
        if self.trace is not None:
            self.trace.compute("block", "input", start, 2 * x.nbytes)
        for unit in self.units:
            x = self._run(unit, "forward", x, step)
        return x

    def forward_loss(self, images, labels, loss, scale: float, step: StepContext) -> tuple[np.ndarray, np.ndarray]:
        """Begin `step`: logits (n, classes), sums of this rank's losses by pieces. Gradients are of scale * loss."""
        self.step = None
        logits, count = self.forward(images, step), len(images)
        losses, gradient = self._losses[:count], self._output_grad[:count]
        start, classes = clock(), self.plan.output.features
        loss.compute(logits, labels, classes, scale, losses, gradient, self.plan.threads)
        if self.trace is not None:
            self.trace.compute("loss", "loss", start, 2 * gradient.nbytes)
        self.step = step
        return logits.reshape(count, self.plan.output.padded_features)[:, :classes], self._sum_losses(losses)

    def _sum_losses(self, losses: np.ndarray) -> np.ndarray:
        """Sums of this rank's losses, by pieces of the whole minibatch (one piece, if not in exact mode).

        Other ranks' pieces are zero, so adding the arrays of all ranks is exact.
        """
        if not self.step.piece_counts:
            return np.array([losses.sum()])
        ends = np.cumsum([0, *self.step.piece_counts]) - bounds(self.step.counts, self._communicator.rank)[0]
        inside = np.clip(ends, 0, len(losses))
        return np.array([losses[start:stop].sum() for start, stop in pairwise(inside)])

    def backward(self, optimizer, epoch: float) -> None:
        """See `Network.backward`."""
        dy = self._output_grad[: len(self.step.sample_ids)]
        if self.overlap:
            self.overlap.begin_backward(optimizer and self._change(optimizer, epoch))
        for unit in reversed(self.units):
            if unit.plan.weight_grad:
                self._run(unit, "weight_grad", dy)
            if not unit.plan.input_grad:
                break  # no layer before this one learns
            dy = self._run(unit, "input_grad", dy)

    def update(self, optimizer, epoch: float) -> None:
        """See `Network.update`."""
        exchanged = self.overlap.layers if self.overlap else ()
        change = self._change(optimizer, epoch)
        if self.overlap:
            self.overlap.update(change)
        for unit in self._learning_units():
            if unit.name not in exchanged:
                start = clock()
                change(unit.name)
                if self.trace is not None:
                    self.trace.compute("update", unit.name, start, 5 * unit.gradients.nbytes)

    def _change(self, optimizer, epoch: float):
        """A function that updates this rank's shard of a layer, by name."""
        exchanged = self.overlap.layers if self.overlap else ()
        units = {unit.name: unit for unit in self._learning_units()}

        def change(name):
            unit, own = units[name], self._placements[name].own
            # Beside compute's threads the communication thread is one more, not a team.
            threads = 1 if name in exchanged and self._communicator.has_thread else self.plan.threads
            optimizer.update(name, unit.parameters[own], unit.gradients[own], epoch, threads)

        return change

    def finish_gradients(self) -> dict[str, np.ndarray]:
        """The flat gradients of each layer; of several ranks' only the owned shard is complete. Collective."""
        if self.overlap:
            self.overlap.finish_gradients()
        return {unit.name: unit.gradients for unit in self._learning_units()}

    def nonfinite(self, is_split: bool) -> list[str]:
        """Layers with a NaN or an infinity, the first one first; see `Network.find_nonfinite`."""
        x = self._input[: len(self.step.sample_ids)]
        found = [] if _finite(x) else ["input"]
        for unit in self.units:
            if found and not is_split:
                break
            x = self._run(unit, "forward", x, self.step)
            if not _finite(x) or (unit.plan.parameters and not _finite(unit.parameters)):
                found.append(unit.name)
        return found + [unit.name for unit in reversed(self._learning_units()) if not _finite(unit.gradients)]

    def _run(self, unit: Unit, pass_name: str, *arguments):
        """Every call of a layer is made here, between the waits for what it needs and gives."""
        if self.overlap and unit.plan.parameters:
            self.overlap.before(pass_name, unit.name)
        start = clock()
        try:
            result = getattr(unit, pass_name)(*arguments)
        except Exception as error:
            error.add_note(f"in {pass_name} of layer {unit.name}, {unit.plan.layer!r}")
            raise
        if self.trace is not None:
            made, share = getattr(unit.plan, pass_name), len(arguments[0]) / unit.plan.images
            self.trace.compute(pass_name, unit.name, start, made.bytes * share, made.flop * share)
        if pass_name == "weight_grad" and self.overlap:
            self.overlap.gradients_ready(unit.name)
        return result

    def _learning_units(self) -> list[Unit]:
        return [unit for unit in self.units if unit.plan.weight_grad]


def _finite(array: np.ndarray) -> bool:
    """Whether all numbers are finite: their sum in float64 is, exactly then (float32 cannot overflow it)."""
    with np.errstate(invalid="ignore"):  # inf - inf
        return bool(np.isfinite(array.sum(dtype=np.float64)))
