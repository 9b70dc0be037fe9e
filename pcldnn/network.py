"""A network at run time: the one place where kernels and messages interleave.

A training step is three calls, on every rank with its own share of the minibatch:

    forward_loss   forward through all layers, loss and its gradient
    backward       from the last layer to the first: weight gradient, its reduce-scatter to the owners, input gradient
    update         from the first layer to the last: each rank updates the shard it owns, allgather of the new weights

What is computed, where it lies in memory and in which order messages go is fixed by the Plan (plan.py); what a layer
computes is in layers/. Here the plan's arrays are allocated, once, and the calls are made.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from pcldnn.communicator import SerialCommunicator
from pcldnn.layers import CrossEntropyLoss
from pcldnn.layers.base import PASSES, Memory, StepContext, Unit, share_pixel_sums
from pcldnn.layers.conv import chosen_algorithm
from pcldnn.layout import aligned_zeros, as_float32, as_integers, block, unblock
from pcldnn.machine import threads_per_rank
from pcldnn.overlap import Overlap
from pcldnn.partition import bounds, shares
from pcldnn.plan import Plan, name_layers, plan
from pcldnn.trace import clock
from pcldnn.tuning import quicker
from pcldnn.units import Placement
from pcldnn.weights import Weights

INFERENCE_IMAGES = 32  # in one piece, when a network is used without `prepare`


class Network:
    """A list of layers with weights.

    Parameters
    ----------
    layers : list of Layer or of (name, Layer)
        Without names the layers get those of PyTorch's model zoo (`plan.name_layers`).
    input_shape : (channels, height, width) or (features,)
    loss : CrossEntropyLoss
    seed : int
        Keys the starting values of the weights and dropout; 0 <= seed < 2**32.
    algorithm : "auto", "direct" or "winograd", optional
        Of convolutions, where a plan is not asked for another one: see `plan.plan`.

    Raises
    ------
    ValueError
        When a layer cannot take its input: names the layer and the numbers.
    """

    def __init__(self, layers, input_shape, loss: CrossEntropyLoss | None = None, seed: int = 0,
                 algorithm: str | None = None):  # fmt: skip
        self.layers = name_layers(layers)
        self.input_shape = tuple(input_shape)
        self.loss = loss or CrossEntropyLoss()
        self.seed = _check_seed(seed)
        self.algorithm = algorithm
        self.communicator = SerialCommunicator()
        self.prepared: Plan | None = None  # the plan that runs
        self._outline = self.plan(1)  # shapes and parameters, which no minibatch changes
        self._weights = Weights(self._outline)
        self._units: list[Unit] = []
        self._overlap: Overlap | None = None  # exchanges under way, on several ranks
        self.trace = None  # a Trace to which calls and waits are added
        self._step: StepContext | None = None  # of the forward pass that backward would belong to

    def __repr__(self) -> str:
        return (
            f"Network({len(self.layers)} layers, {self.input_shape} to {self._outline.output.logical_shape}, "
            f"{self.parameter_count:,} parameters)"
        )

    # --- description ---

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the layers."""
        return tuple(name for name, _ in self.layers)

    @property
    def num_classes(self) -> int:
        """Numbers the network gives for an image."""
        return self._outline.output.features

    @property
    def parameter_count(self) -> int:
        """Numbers that are learnt."""
        return self._outline.parameter_count

    def plan(self, minibatch: int, ranks: int = 1, *, tune: bool | dict = False, **options) -> Plan:
        """What a run would do and need; see `plan.plan`. Allocates nothing, unless it has to `tune`: see `prepare`."""
        return self._plan(minibatch, ranks, tune, SerialCommunicator(), options)

    def _plan(self, minibatch, ranks, tune, communicator, options) -> Plan:
        options = {"algorithm": self.algorithm, **options}

        def make(**changes):
            return plan(self.layers, self.input_shape, minibatch, ranks, **{**options, **changes})

        if tune is True:
            tune = quicker(make, communicator) if chosen_algorithm(options["algorithm"]) == "auto" else False
        return make(tuned=tune) if tune else make()

    # --- weights ---

    @property
    def parameters(self) -> dict[str, np.ndarray]:
        """The flat, blocked array of each layer that has weights; drawn from `seed` when first asked for.

        Of a layer that is split, this rank's part.
        """
        self.finish()
        if not self._weights.flat:
            self.initialize(self.seed)
        return self._weights.flat

    @property
    def is_split(self) -> bool:
        """Whether ranks hold parts of some layer, by its Partition.

        Then `forward`, `state_dict` and `gradients` are collective: every rank calls them. `join` ends it.
        """
        return self._weights.is_split

    def join(self) -> None:
        """Hold all weights on every rank again; collective. A split network must be prepared anew to train on."""
        self.finish()
        if self.is_split:
            self._weights.place({})
            self.prepared, self._units, self._step, self._overlap = None, [], None, None

    def initialize(self, seed: int) -> None:
        """Draw all weights: the same for every rank, SIMD width and number of ranks.

        Normal with a standard deviation that suits the activation behind the layer: He et al. 2015 before ReLU,
        Glorot and Bengio 2010 before tanh and four times that before a sigmoid. Dropout and max pooling in front of a
        layer raise the mean square of what it sees; that is taken out again. The last layer gets a tenth of Glorot's,
        so that class scores start near zero. (Without the last two, VGG-A on the digits starts at a loss of 10, and
        the first steps of plain SGD kill its units for good with some seeds.) Biases are zero.
        """
        self.seed = _check_seed(seed)
        self.finish()
        self._weights.draw(self.layers, seed)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies of all weights in logical order under PyTorch's names: "features.0.weight" is (K, C, R, S)."""
        return {name: value for layer in self.state_by_layer() for name, value in layer.items()}

    def state_by_layer(self) -> Iterator[dict[str, np.ndarray]]:
        """The same a layer at a time."""
        yield from self._weights.logical(self.parameters)

    def load_state_dict(self, values: dict) -> None:
        """Set all weights from logical arrays, as `state_dict` gives them.

        Raises ValueError, before anything is changed, when one is missing, unknown or of the wrong shape or dtype.
        """
        self.finish()
        self._weights.load(values)

    def gradients(self) -> dict[str, np.ndarray]:
        """Gradients of the last `backward`, logical; of several ranks' only the owned shard is complete. Collective."""
        self._training_plan("gradients")
        if self._overlap:
            self._overlap.finish_gradients()
        flat = {unit.name: unit.gradients for unit in self._learning_units()}
        return {name: value for layer in self._weights.logical(flat) for name, value in layer.items()}

    # --- preparation ---

    def prepare(
        self, minibatch: int, communicator=None, threads: int | None = None, training: bool = True, *,
        partitions: dict | None = None, exact: bool | int = False, tune: bool | dict = False,
    ) -> Plan:  # fmt: skip
        """Plan a run and allocate everything it needs. Collective.

        Parameters
        ----------
        minibatch : int
            Images a step on all ranks together.
        communicator : Communicator, optional
            Default: this process alone.
        threads : int, optional
            Default: the cores of this rank (`machine.threads_per_rank`).
        training : bool
            False: only `forward` will be used.
        partitions, exact
            As for `plan.plan`. With several ranks large layers may be split even if no partition is given: see
            `is_split`.
        tune : bool or dict
            True: where a convolution can be computed directly and by Winograd, time both for a rank's images, by layer
            and pass, and take the one of the smaller sum over ranks (`tuning.quicker`); not in exact mode. A dict: the
            choice that an earlier plan came to (`Plan.tuned`), which nothing is timed for. An `algorithm`, or
            PCLDNN_CONV, is stronger than either.

        Raises
        ------
        DisagreementError
            On all ranks, when they built different networks or run different SIMD widths.
        """
        communicator = communicator or SerialCommunicator()
        threads, _ = threads_per_rank(communicator.ranks_sharing_cores, threads)
        options = {"threads": threads, "training": training, "partitions": partitions, "exact": exact}
        new = self._plan(minibatch, communicator.size, tune, communicator, options)
        if training:
            self.loss.check(new.output)
        communicator.agree({**new.description(), "loss": repr(self.loss), "seed": str(self.seed)})
        placements = {layer.name: Placement(layer, communicator) for layer in new.layers if layer.parameters}
        self.finish()
        self._weights.place(placements)
        if training:
            self._weights.owners = placements
        self.communicator = communicator
        self.prepared = new
        self._allocate(new)
        return new

    def _allocate(self, new: Plan) -> None:
        self._units, self._step, self._overlap = [], None, None  # gives back what an earlier plan held
        arena = self._arena = aligned_zeros(new.arena_size)
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
            placement = self._weights.placements.get(layer.name)
            scratch = dict.fromkeys(PASSES) | {
                role.removesuffix(" scratch"): flat
                for (name, role), flat in arrays.items()
                if name == layer.name and role not in ("output", "input_grad")
            }
            memory = Memory(
                output=array(layer.name, "output", layer.output),
                input_grad=array(layer.name, "input_grad", layer.input),
                parameters=self.parameters.get(layer.name),
                gradients=placement.data.allocate(placement.part.parameter_size) if layer.weight_grad else None,
                scratch=scratch,
            )
            self._units.append(
                placement.unit(memory, new.threads) if placement else Unit(layer, memory, new.threads)
            )
            if layer.relu_input and not new.pieces:  # exact sums are of pieces of the minibatch
                share_pixel_sums(*self._units[-2:])
        if new.training and new.ranks > 1:
            bandwidth = self.communicator.bandwidth() if self.communicator.has_thread else float("inf")
            placements = self._weights.placements
            self._overlap = Overlap(new, self._units, placements, self.communicator, bandwidth, self.trace)

    def _share(self) -> None:
        """Move the weights to memory from which exchanges between ranks are fast; collective."""
        for name, values in self.parameters.items():
            data = self._weights.placements[name].data
            if data.size > 1:
                self._weights.flat[name] = data.allocate(values.size)
                self._weights.flat[name][:] = values

    # --- passes ---

    def forward(self, images) -> np.ndarray:
        """Outputs for any number of images, without dropout; collective only when the network `is_split`.

        Parameters
        ----------
        images : (N, C, H, W) or (N, F), float32 or a type that float32 holds exactly, any strides

        Returns
        -------
        (N, classes) float32, a new array
        """
        images = self._check_images(images)
        if self.prepared is None:
            self.prepare(INFERENCE_IMAGES, training=False)
        running, self._step = self.prepared, None
        outputs = np.empty((len(images), *running.output.logical_shape), np.float32)
        counts = self.communicator.allgather_object(len(images)) if self.is_split else [len(images)]
        for start in range(0, max(counts), running.images):
            part = slice(start, start + running.images)
            step = StepContext(counts=tuple(min(max(count - start, 0), running.images) for count in counts))
            outputs[part] = unblock(self._forward(images[part], step), running.output, running.threads)
        return outputs

    def forward_loss(
        self, images, labels, sample_ids=None, epoch: int = 0, global_count: int | None = None
    ) -> tuple[float, np.ndarray]:
        """Forward pass of a training step.

        Parameters
        ----------
        images : (n, C, H, W) or (n, F)
            This rank's share of the minibatch; n may be 0, and at most `prepared.images`.
        labels : (n,) integers
        sample_ids : (n,) integers, optional
            Which samples of the data set these are: keys dropout. Default 0..n-1.
        epoch : int
            Keys dropout.
        global_count : int, optional
            Images of this step on all ranks (default n). Gradients are of the sum of all losses divided by this, so
            ranks with unlike shares weigh their samples alike.

        Returns
        -------
        loss : float
            Sum of this rank's losses [nat], not divided.
        logits : (n, classes)
            A view, valid until the next forward pass.

        Raises
        ------
        ValueError
            For a label outside 0..classes-1 (before gradients are touched), and for arrays of the wrong shape.
        """
        running = self._training_plan("forward_loss")
        images = self._check_images(images)
        count = len(images)
        labels = as_integers(labels, "labels", count)
        sample_ids = np.arange(count) if sample_ids is None else as_integers(sample_ids, "sample_ids", count)
        total = max(count, 1) if global_count is None else global_count
        if count > running.images or total < max(count, 1):
            raise ValueError(
                f"images: got {count} in a step of global_count {total}, wanted at most {running.images} "
                f"(prepared for a minibatch of {running.minibatch} on {running.ranks} ranks)"
            )
        counts = self._image_counts(count, total)
        self._step = None
        pieces = shares(total, running.pieces) if running.pieces else ()
        step = StepContext(True, self.seed, epoch, sample_ids, counts, pieces)
        logits = self._forward(images, step)
        losses, gradient = self._losses[:count], self._output_grad[:count]
        start = clock()
        self.loss.compute(logits, labels, self.num_classes, 1 / total, losses, gradient, running.threads)
        if self.trace is not None:
            self.trace.compute("loss", "loss", start, 2 * gradient.nbytes)
        self._step = step
        self.piece_losses = self._sum_losses(losses, step)
        scores = logits.reshape(count, running.output.padded_features)[:, : self.num_classes]
        return float(self.piece_losses.sum()), scores

    def _image_counts(self, count: int, total: int) -> tuple[int, ...]:
        """Images of each rank in a step of `total`. Where ranks work on each other's images, the rule must hold."""
        running = self.prepared
        counts = running.image_shares(total)
        wanted = counts[self.communicator.rank]
        if (self.is_split or running.pieces) and count != wanted:
            raise ValueError(
                f"images: got {count} in a step of global_count {total} on rank {self.communicator.rank} of "
                f"{running.ranks}, wanted {wanted} as grid.image_shares has it, since a layer is split or sums are "
                "exact (partitions={'conv': Partition(ranks, 1), 'fc': Partition(ranks, 1)} splits none)"
            )
        return counts

    def _sum_losses(self, losses: np.ndarray, step: StepContext) -> np.ndarray:
        """Sums of this rank's losses, by pieces of the whole minibatch (one piece, if not in exact mode).

        Other ranks' pieces are zero, so adding the arrays of all ranks is exact.
        """
        if not step.piece_counts:
            return np.array([losses.sum()])
        ends = np.cumsum([0, *step.piece_counts]) - bounds(step.counts, self.communicator.rank)[0]
        inside = np.clip(ends, 0, len(losses))
        return np.array([losses[start:stop].sum() for start, stop in pairwise(inside)])

    def backward(self, optimizer=None, epoch: float = 0.0) -> None:
        """Gradients of the step that `forward_loss` began; each is sent to its owners as it gets ready. Collective.

        With an optimizer, the update of a layer may begin as soon as backward has passed it, if the network would
        stand idle. `update` with the same arguments must follow, unless the step was refused (`start_sum`).
        """
        step = self._started("backward")
        dy = self._output_grad[: len(step.sample_ids)]
        if self._overlap:
            self._overlap.begin_backward(optimizer and self._change(optimizer, epoch))
        for unit in reversed(self._units):
            if unit.plan.weight_grad:
                self._run(unit, "weight_grad", dy)
            if not unit.plan.input_grad:
                break  # no layer before this one learns
            dy = self._run(unit, "input_grad", dy)

    def update(self, optimizer, epoch: float = 0.0) -> None:
        """Let `optimizer` change the weights. Collective.

        Each rank updates the shard it owns and receives the others'. `epoch` (fractional: steps / steps of an epoch)
        is for the schedule of the learning rate. Returns before all is done when the communicator has a thread: the
        next forward pass, or whatever else needs the weights, waits for them (`finish`).
        """
        self._training_plan("update")
        exchanged = self._overlap.layers if self._overlap else ()
        change = self._change(optimizer, epoch)
        if self._overlap:
            self._overlap.update(change)
        for unit in self._learning_units():
            if unit.name not in exchanged:
                start = clock()
                change(unit.name)
                if self.trace is not None:
                    self.trace.compute("update", unit.name, start, 5 * unit.gradients.nbytes)

    def _change(self, optimizer, epoch: float):
        """A function that updates this rank's shard of a layer, by name."""
        exchanged = self._overlap.layers if self._overlap else ()
        units = {unit.name: unit for unit in self._learning_units()}

        def change(name):
            unit, own = units[name], self._weights.placements[name].own
            # Beside compute's threads the communication thread is one more, not a team.
            threads = 1 if name in exchanged and self.communicator.has_thread else self.prepared.threads
            optimizer.update(name, unit.parameters[own], unit.gradients[own], epoch, threads)

        return change

    def start_sum(self, array: np.ndarray, refuses=None):
        """Begin to add a small array of numbers over the ranks, beside compute, before `backward`. Collective.

        Returns a function that waits for the sum and gives it; whoever calls it before `update` may still refuse
        the step. If backward is given the optimizer, `refuses(sum)` must tell it when that will be so.
        """
        return self._overlap.start_sum(array, refuses) if self._overlap else lambda: array

    def finish(self) -> None:
        """Wait until the last `update` is done on this rank."""
        if self._overlap:
            self._overlap.finish()

    def _forward(self, images: np.ndarray, step: StepContext) -> np.ndarray:
        """Blocked output for logical images."""
        start = clock()
        x = block(images, self.prepared.input, self._input[: len(images)], self.prepared.threads)
        if self.trace is not None:
            self.trace.compute("block", "input", start, 2 * x.nbytes)
        for unit in self._units:
            x = self._run(unit, "forward", x, step)
        return x

    def _run(self, unit: Unit, pass_name: str, *arguments):
        """Every call of a layer in this file is made here, between the waits for what it needs and gives."""
        if self._overlap and unit.plan.parameters:
            self._overlap.before(pass_name, unit.name)
        start = clock()
        try:
            result = getattr(unit, pass_name)(*arguments)
        except Exception as error:
            error.add_note(f"in {pass_name} of layer {unit.name}, {unit.plan.layer!r}")
            raise
        if self.trace is not None:
            made, share = getattr(unit.plan, pass_name), len(arguments[0]) / unit.plan.images
            self.trace.compute(pass_name, unit.name, start, made.bytes * share, made.flop * share)
        if pass_name == "weight_grad" and self._overlap:
            self._overlap.gradients_ready(unit.name)
        return result

    def _learning_units(self) -> list[Unit]:
        return [unit for unit in self._units if unit.plan.weight_grad]

    def gather_shards(self, shards: dict[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        """Logical arrays, named like the weights, of something that ranks hold in shards (momentum). Collective.

        Yields a layer at a time, so that a rank never holds the whole; all ranks advance together.
        """
        self._check_owners("gather_shards")
        self.finish()
        yield from self._weights.gather_shards(shards)

    def cut_shards(self, logical: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """This rank's shards of logical arrays named like the weights: the inverse of `gather_shards`."""
        self._check_owners("cut_shards")
        self.finish()
        return self._weights.cut_shards(logical)

    # --- checks ---

    def _check_owners(self, caller: str) -> None:
        if not self._weights.owners:
            raise ValueError(f"Network.{caller}: call prepare(minibatch, communicator) first")

    def find_nonfinite(self) -> str | None:
        """Name of the first layer with a NaN or an infinity in its weights or outputs, else in its gradients.

        For use after a loss that is not finite, before `update`: the step's forward pass is run again from its kept
        input ("input" is the answer when that is at fault). None when all is finite. Collective only when the network
        `is_split`.
        """
        step = self._started("find_nonfinite")
        self.finish()
        x = self._input[: len(step.sample_ids)]
        found = [] if _finite(x) else ["input"]
        for unit in self._units:
            if found and not self.is_split:
                break
            x = self._run(unit, "forward", x, step)
            if not _finite(x) or (unit.plan.parameters and not _finite(unit.parameters)):
                found.append(unit.name)
        found += [unit.name for unit in reversed(self._learning_units()) if not _finite(unit.gradients)]
        return found[0] if found else None

    def _check_images(self, images) -> np.ndarray:
        images = np.asarray(images)
        if len(self.input_shape) == 1 and images.shape[1:] == (*self.input_shape, 1, 1):
            images = images[:, :, 0, 0]  # a data set of images may hold vectors as 1x1 images
        return as_float32(images, "images", (None, *self.input_shape))

    def _training_plan(self, caller: str) -> Plan:
        if self.prepared is None or not self.prepared.training:
            raise ValueError(f"Network.{caller}: call prepare(minibatch, communicator) first")
        return self.prepared

    def _started(self, caller: str) -> StepContext:
        if self._step is None:
            raise ValueError(f"Network.{caller}: call forward_loss first")
        return self._step


def _check_seed(seed: int) -> int:
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed: got {seed}, wanted 0 <= seed < 2**32")
    return seed


def _finite(array: np.ndarray) -> bool:
    """Whether all numbers are finite: their sum in float64 is, exactly then (float32 cannot overflow it)."""
    with np.errstate(invalid="ignore"):  # inf - inf
        return bool(np.isfinite(array.sum(dtype=np.float64)))
