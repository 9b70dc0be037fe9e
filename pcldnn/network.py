"""A network: layers with weights, and what can be asked of them.

A training step is three calls, on every rank with its own share of the minibatch:

    forward_loss   forward through all layers, loss and its gradient
    backward       from the last layer to the first: weight gradient, its reduce-scatter to the owners, input gradient
    update         from the first layer to the last: each rank updates the shard it owns, allgather of the new weights

What is computed, where it lies in memory and in which order messages go is fixed by the Plan (plan.py); what a layer
computes is in layers/. Here arguments are checked and weights kept; passes.py runs the plan.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pcldnn.communicator import SerialCommunicator
from pcldnn.layers import CrossEntropyLoss
from pcldnn.layers.base import StepContext
from pcldnn.layers.conv import chosen_algorithm
from pcldnn.layout import as_float32, as_integers, unblock
from pcldnn.machine import threads_per_rank
from pcldnn.partition import shares
from pcldnn.passes import Passes
from pcldnn.plan import Plan, name_layers, plan
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
        self._outline = self.plan(1)  # shapes and parameters, which no minibatch changes
        self._weights = Weights(self._outline)
        self._passes: Passes | None = None  # of the plan that runs
        self._trace = None

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

    @property
    def prepared(self) -> Plan | None:
        """The plan that runs."""
        return self._passes.plan if self._passes else None

    @property
    def trace(self):
        """A Trace to which calls and waits are added; None: they are not. Exchanges use what was set at `prepare`."""
        return self._trace

    @trace.setter
    def trace(self, trace):
        self._trace = trace
        if self._passes:
            self._passes.trace = trace

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
            self._passes = None

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
        flat = self._training("gradients").finish_gradients()
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
        self._passes = None  # gives back what an earlier plan held
        self._passes = Passes(new, self.parameters, placements, communicator, self.trace)
        return new

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
        running, self._passes.step = self.prepared, None
        outputs = np.empty((len(images), *running.output.logical_shape), np.float32)
        counts = self.communicator.allgather_object(len(images)) if self.is_split else [len(images)]
        for start in range(0, max(counts), running.images):
            part = slice(start, start + running.images)
            step = StepContext(counts=tuple(min(max(count - start, 0), running.images) for count in counts))
            outputs[part] = unblock(self._passes.forward(images[part], step), running.output, running.threads)
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
        passes = self._training("forward_loss")
        running = passes.plan
        images = self._check_images(images)
        count = len(images)
        labels = as_integers(labels, "labels", count)
        sample_ids = np.arange(count) if sample_ids is None else as_integers(sample_ids, "sample_ids", count)
        total = max(count, 1) if global_count is None else global_count
        counts = running.step_counts(self.communicator.rank, count, total)
        pieces = shares(total, running.pieces) if running.pieces else ()
        step = StepContext(True, self.seed, epoch, sample_ids, counts, pieces)
        scores, self.piece_losses = passes.forward_loss(images, labels, self.loss, 1 / total, step)
        return float(self.piece_losses.sum()), scores

    def backward(self, optimizer=None, epoch: float = 0.0) -> None:
        """Gradients of the step that `forward_loss` began; each is sent to its owners as it gets ready. Collective.

        With an optimizer, the update of a layer may begin as soon as backward has passed it, if the network would
        stand idle. `update` with the same arguments must follow, unless the step was refused (`start_sum`).
        """
        self._started("backward").backward(optimizer, epoch)

    def update(self, optimizer, epoch: float = 0.0) -> None:
        """Let `optimizer` change the weights. Collective.

        Each rank updates the shard it owns and receives the others'. `epoch` (fractional: steps / steps of an epoch)
        is for the schedule of the learning rate. Returns before all is done when the communicator has a thread: the
        next forward pass, or whatever else needs the weights, waits for them (`finish`).
        """
        self._training("update").update(optimizer, epoch)

    def start_sum(self, array: np.ndarray, refuses=None):
        """Begin to add a small array of numbers over the ranks, beside compute, before `backward`. Collective.

        Returns a function that waits for the sum and gives it; whoever calls it before `update` may still refuse
        the step. If backward is given the optimizer, `refuses(sum)` must tell it when that will be so.
        """
        overlap = self._passes and self._passes.overlap
        return overlap.start_sum(array, refuses) if overlap else lambda: array

    def finish(self) -> None:
        """Wait until the last `update` is done on this rank."""
        if self._passes and self._passes.overlap:
            self._passes.overlap.finish()

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
        passes = self._started("find_nonfinite")
        self.finish()
        return next(iter(passes.nonfinite(self.is_split)), None)

    def _check_images(self, images) -> np.ndarray:
        images = np.asarray(images)
        if len(self.input_shape) == 1 and images.shape[1:] == (*self.input_shape, 1, 1):
            images = images[:, :, 0, 0]  # a data set of images may hold vectors as 1x1 images
        return as_float32(images, "images", (None, *self.input_shape))

    def _training(self, caller: str) -> Passes:
        if self.prepared is None or not self.prepared.training:
            raise ValueError(f"Network.{caller}: call prepare(minibatch, communicator) first")
        return self._passes

    def _started(self, caller: str) -> Passes:
        if self._passes is None or self._passes.step is None:
            raise ValueError(f"Network.{caller}: call forward_loss first")
        return self._passes


def _check_seed(seed: int) -> int:
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed: got {seed}, wanted 0 <= seed < 2**32")
    return seed
