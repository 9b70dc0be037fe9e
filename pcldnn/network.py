"""A network at run time: the one place where kernels and messages interleave.

A training step is three calls, on every rank with its own share of the minibatch:

    forward_loss   forward through all layers, loss and its gradient
    backward       from the last layer to the first: weight gradient, its reduce-scatter to the owners, input gradient
    update         from the first layer to the last: each rank updates the shard it owns, allgather of the new weights

What is computed, where it lies in memory and in which order messages go is fixed by the Plan (plan.py); what a layer
computes is in layers/. Here the plan's arrays are allocated, once, and the calls are made.
"""

from __future__ import annotations

from math import sqrt

import numpy as np

from pcldnn.layers import CrossEntropyLoss
from pcldnn.layers.base import PASSES, LayerPlan, Memory, StepContext, Unit, draw_parameters, glorot_std
from pcldnn.layout import aligned_zeros, as_float32, as_integers, block, unblock
from pcldnn.machine import threads_per_rank
from pcldnn.overlap import Overlap
from pcldnn.partition import bounds
from pcldnn.plan import Plan, name_layers, plan
from pcldnn.trace import clock

LAST_GAIN = 0.1  # weights without an activation behind them, the class scores': see Network.initialize
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

    Raises
    ------
    ValueError
        When a layer cannot take its input: names the layer and the numbers.
    """

    def __init__(self, layers, input_shape, loss: CrossEntropyLoss | None = None, seed: int = 0):
        self.layers = name_layers(layers)
        self.input_shape = tuple(input_shape)
        self.loss = loss or CrossEntropyLoss()
        self.seed = _check_seed(seed)
        self.communicator = None
        self.prepared: Plan | None = None  # the plan that runs
        self._outline = self.plan(1)  # shapes and parameters, which no minibatch changes
        self._parameters: dict[str, np.ndarray] | None = None
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

    def plan(self, minibatch: int, ranks: int = 1, **options) -> Plan:
        """What a run would do and need; see `plan.plan`. Allocates nothing."""
        return plan(self.layers, self.input_shape, minibatch, ranks, **options)

    # --- weights ---

    @property
    def parameters(self) -> dict[str, np.ndarray]:
        """The flat, blocked array of each layer that has weights; drawn from `seed` when first asked for."""
        self.finish()
        if self._parameters is None:
            self.initialize(self.seed)
        return self._parameters

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
        self._allocate_parameters()
        for layer in self._learning():
            values = draw_parameters(layer.parameters, self._weight_std(layer.index), seed, layer.index)
            layer.to_flat(values, self._parameters[layer.name])

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies of all weights in logical order under PyTorch's names: "features.0.weight" is (K, C, R, S)."""
        return self._to_logical(self.parameters)

    def load_state_dict(self, values: dict) -> None:
        """Set all weights from logical arrays, as `state_dict` gives them.

        Raises ValueError, before anything is changed, when one is missing, unknown or of the wrong shape or dtype.
        """
        checked = self._check_logical(values)
        self.finish()
        self._allocate_parameters()
        for layer in self._learning():
            layer.to_flat(_of_layer(checked, layer), self._parameters[layer.name])

    def gradients(self) -> dict[str, np.ndarray]:
        """Gradients of the last `backward`, logical. With several ranks complete only for the owned shard; collective."""
        if self._overlap:
            self._overlap.finish_gradients()
        return self._to_logical({unit.name: unit.gradients for unit in self._units if unit.plan.weight_grad})

    def _learning(self) -> list[LayerPlan]:
        return [layer for layer in self._outline.layers if layer.parameters]

    def _allocate_parameters(self) -> None:
        if self._parameters is None:
            self._parameters = {layer.name: aligned_zeros(layer.parameter_size) for layer in self._learning()}

    def _weight_std(self, index: int):
        """The rule for the spread of a layer's weights, from the layers between it and its neighbours with weights."""
        learning = {layer.index for layer in self._learning()}
        gain = 1.0
        for before in reversed(range(index)):
            if before in learning:
                break
            gain /= sqrt(self.layers[before][1].spread)
        for behind in range(index + 1, len(self.layers)):
            if behind in learning:
                break
            rule = self.layers[behind][1].weight_std
            if rule:
                return lambda fan_in, fan_out: gain * rule(fan_in, fan_out)
        return lambda fan_in, fan_out: LAST_GAIN * gain * glorot_std(fan_in, fan_out)

    def _to_logical(self, flat: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {
            f"{layer.name}.{name}": value
            for layer in self._learning()
            for name, value in layer.from_flat(flat[layer.name]).items()
        }

    def _check_logical(self, values: dict) -> dict[str, np.ndarray]:
        shapes = {f"{layer.name}.{p.name}": p.shape for layer in self._learning() for p in layer.parameters}
        missing = sorted(set(shapes) - set(values))
        unknown = sorted(set(values) - set(shapes))
        if missing or unknown:
            raise ValueError(f"state: missing {missing or 'nothing'}, not in this network {unknown or 'nothing'}")
        return {name: as_float32(values[name], name, shape) for name, shape in shapes.items()}

    # --- preparation ---

    def prepare(self, minibatch: int, communicator=None, threads: int | None = None, training: bool = True) -> Plan:
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

        Raises
        ------
        DisagreementError
            On all ranks, when they built different networks or run different SIMD widths.
        """
        ranks, sharing = (communicator.size, communicator.ranks_sharing_cores) if communicator else (1, 1)
        threads, _ = threads_per_rank(sharing, threads)
        new = self.plan(minibatch, ranks, threads=threads, training=training)
        if training:
            self.loss.check(new.output)
        if communicator:
            communicator.agree({**new.description(), "loss": repr(self.loss), "seed": str(self.seed)})
        self.communicator = communicator
        self.prepared = new
        self._allocate(new)
        return new

    def _allocate(self, new: Plan) -> None:
        self.finish()
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
        self._parameters = {name: self._shareable(values) for name, values in self.parameters.items()}
        for layer in new.layers:
            memory = Memory(
                output=array(layer.name, "output", layer.output),
                input_grad=array(layer.name, "input_grad", layer.input),
                parameters=self.parameters.get(layer.name),
                gradients=self._shareable(np.zeros(layer.parameter_size, np.float32)) if layer.weight_grad else None,
                scratch={p: arrays[layer.name, f"{p} scratch"] for p in PASSES if (layer.name, f"{p} scratch") in arrays},
            )
            self._units.append(Unit(layer, memory, new.threads))
        if new.messages:
            bandwidth = self.communicator.bandwidth() if self.communicator.has_thread else float("inf")
            self._overlap = Overlap(new, self._units, self.communicator, bandwidth, self.trace)

    def _shareable(self, values: np.ndarray) -> np.ndarray:
        """The values in memory from which exchanges between ranks are fast; collective."""
        if self.communicator is None or not self.prepared.training:
            return values
        array = self.communicator.allocate(values.size)
        array[:] = values
        return array

    # --- passes ---

    def forward(self, images) -> np.ndarray:
        """Outputs for any number of images, without dropout; not collective.

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
        for start in range(0, len(images), running.images):
            part = slice(start, start + running.images)
            outputs[part] = unblock(self._forward(images[part], StepContext()), running.output, running.threads)
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
        self._step = None
        step = StepContext(True, self.seed, epoch, sample_ids)
        logits = self._forward(images, step)
        losses, gradient = self._losses[:count], self._output_grad[:count]
        start = clock()
        self.loss.compute(logits, labels, self.num_classes, 1 / total, losses, gradient, running.threads)
        if self.trace is not None:
            self.trace.compute("loss", "loss", start, 2 * gradient.nbytes)
        self._step = step
        return float(losses.sum()), logits.reshape(count, running.output.padded_features)[:, : self.num_classes]

    def backward(self) -> None:
        """Gradients of the step that `forward_loss` began. Collective: each goes to its owners as soon as it is there."""
        step = self._started("backward")
        dy = self._output_grad[: len(step.sample_ids)]
        if self._overlap:
            self._overlap.begin_backward()
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
        running = self._training_plan("update")
        units = {unit.name: unit for unit in self._units if unit.plan.weight_grad}

        def change(name):
            unit, own = units[name], slice(*self._owned(units[name].plan))
            # Beside compute's threads the communication thread is one more, not a team.
            threads = 1 if self._overlap and self.communicator.has_thread else running.threads
            optimizer.update(name, unit.parameters[own], unit.gradients[own], epoch, threads)

        if self._overlap:
            self._overlap.update(change)
        else:
            for name, unit in units.items():
                start = clock()
                change(name)
                if self.trace is not None:
                    self.trace.compute("update", name, start, 5 * unit.gradients.nbytes)

    def start_sum(self, array: np.ndarray):
        """Begin to add a small array of numbers over the ranks, beside compute. Collective.

        Returns a function that waits for the sum and gives it; whoever calls it before `update` may still refuse
        the step.
        """
        return self._overlap.start_sum(array) if self._overlap else lambda: array

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
        if self._overlap and pass_name == "weight_grad":
            self._overlap.gradients_ready(unit.name)
        return result

    # --- several ranks ---

    def _owned(self, layer: LayerPlan) -> tuple[int, int]:
        """Start and stop of this rank's shard of a layer's flat array."""
        return bounds(self.prepared.shards(layer), self.communicator.rank if self.communicator else 0)

    def gather_shards(self, shards: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Logical arrays, named like the weights, of something that ranks hold in shards (momentum). Collective."""
        self._training_plan("gather_shards")
        self.finish()
        logical = {}
        for layer in self._learning():
            flat = aligned_zeros(layer.parameter_size)
            flat[slice(*self._owned(layer))] = shards[layer.name]
            if self.prepared.ranks > 1:
                self.communicator.allgather(flat, self.prepared.shards(layer))
            logical |= {f"{layer.name}.{name}": value for name, value in layer.from_flat(flat).items()}
        return logical

    def cut_shards(self, logical: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """This rank's shards of logical arrays named like the weights: the inverse of `gather_shards`."""
        self._training_plan("cut_shards")
        self.finish()
        checked = self._check_logical(logical)
        shards = {}
        for layer in self._learning():
            flat = aligned_zeros(layer.parameter_size)
            layer.to_flat(_of_layer(checked, layer), flat)
            shards[layer.name] = flat[slice(*self._owned(layer))].copy()
        return shards

    # --- checks ---

    def find_nonfinite(self) -> str | None:
        """Name of the first layer with a NaN or an infinity in its weights or outputs, else in its gradients.

        For use after a loss that is not finite, before `update`: the step's forward pass is run again from its kept
        input ("input" is the answer when that is at fault). None when all is finite. Not collective.
        """
        step = self._started("find_nonfinite")
        self.finish()
        x = self._input[: len(step.sample_ids)]
        if not _finite(x):
            return "input"
        for unit in self._units:
            if unit.plan.parameters and not _finite(unit.parameters):
                return unit.name
            x = self._run(unit, "forward", x, step)
            if not _finite(x):
                return unit.name
        with_gradients = [unit for unit in reversed(self._units) if unit.plan.weight_grad]
        return next((unit.name for unit in with_gradients if not _finite(unit.gradients)), None)

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


def _of_layer(values: dict[str, np.ndarray], layer: LayerPlan) -> dict[str, np.ndarray]:
    """The parameters of one layer, under their own names."""
    return {parameter.name: values[f"{layer.name}.{parameter.name}"] for parameter in layer.parameters}


def _check_seed(seed: int) -> int:
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed: got {seed}, wanted 0 <= seed < 2**32")
    return seed


def _finite(array: np.ndarray) -> bool:
    """Whether all numbers are finite: their sum in float64 is, exactly then (float32 cannot overflow it)."""
    return bool(np.isfinite(array.sum(dtype=np.float64)))
