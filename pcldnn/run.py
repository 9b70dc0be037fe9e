"""A training run: the same minibatches, the same losses and the same decisions on any number of ranks.

A step is ``forward_loss``, ``backward`` (each layer's gradient goes to its owners as soon as it is there) and
``update`` (owners apply SGD, new weights come back): Network does these. What this file adds is what must be agreed
upon between ranks:

(a) The loss of a step is the sum over all samples of all ranks divided by their number, never a mean of means.
(b) A control word travels with the loss: whether some rank's loss is not finite, whether some rank wants to stop.
    So all ranks leave the loop after the same step, for the same reason.
(c) An error that every rank knows and concludes alike (`faults.CollectiveError`) is raised as an ordinary exception
    on all of them. Whatever happens on one rank alone ends the whole job (`Communicator.abort_on_error`): the others
    would wait for it for ever.
"""
import dataclasses
import functools
import itertools
import math
import time

import numpy as np

from pcldnn import __version__, _kernels
from pcldnn.checkpoint import (
    MOMENTUM_PREFIX,
    CheckpointError,
    CollectiveCheckpointError,
    CollectiveReader,
    check_writable,
    save_collective,
)
from pcldnn.data import Loader, check_class_map
from pcldnn.digest import layer_digests, network_digest, run_identity, total_digest
from pcldnn.evaluation import Evaluation, evaluate
from pcldnn.faults import CollectiveError
from pcldnn.plan_table import changed_algorithms, format_algorithms
from pcldnn.safetensors import remove_leftovers

DIGEST_INTERVAL = 10  # [steps] in exact mode: a digest hashes all weights and momentum, which takes time


class TrainingDiverged(CollectiveError, ArithmeticError):
    """The loss became NaN or infinite; raised on every rank after the same step, before weights were touched.

    Attributes
    ----------
    step : int
        The step (counted from 1) whose loss is not finite.
    culprits : dict of int to str
        Rank -> the first layer there that has a value which is not finite.
    """

    def __init__(self, step, loss, culprits):
        self.step, self.loss, self.culprits = step, loss, culprits
        first = {}
        for rank, name in sorted(culprits.items()):
            first.setdefault(name, rank)
        where = "; ".join(f"first seen in {name} on rank {rank}" for name, rank in first.items())
        super().__init__(f"the loss of step {step} is {loss} ({where}). No weight was changed by this step. A smaller "
                         "learning rate (--lr) is the usual cure; look at the data if it was in the input.")


class OutputError(CollectiveError, OSError):
    """The metrics file or the folder of the checkpoint cannot be written; raised on every rank before training."""


@dataclasses.dataclass
class TrainingResult:
    """What `Trainer.fit` returns, the same on every rank but for the times.

    Attributes
    ----------
    step, epoch : int
        Steps done in total (those before a resume included), epochs completed.
    losses : list of float
        Loss of each step of this call.
    evaluation : Evaluation or None
        The last one.
    images_per_s : float
        Over all ranks, of this call, without evaluations and checkpoints.
    seconds : float
        Of this call, all in all.
    stopped : str or None
        Why training ended before its last step.
    checkpoint_error, metrics_error : str or None
        Why the last checkpoint, or the rest of the metrics file, could not be written.
    """
    step: int = 0
    epoch: int = 0
    losses: list = dataclasses.field(default_factory=list)
    evaluation: Evaluation = None
    images_per_s: float = 0.0
    seconds: float = 0.0
    stopped: str = None
    checkpoint_error: str = None
    metrics_error: str = None


class Run:
    """One call of `Trainer.fit`, whose arguments it has: its position, and what happens at each step and epoch."""

    def __init__(self, trainer, train, validation, *, minibatch, epochs, steps, checkpoint, digest_interval, callback,
                 report, recording, settings, loader_options):
        for name, value, least in (("minibatch", minibatch, 1), ("epochs", epochs, 0), ("steps", steps or 0, 0)):
            if int(value) != value or value < least:
                raise ValueError(f"{name} = {value!r}, wanted an integer of at least {least}")
        if len(train) == 0:
            raise ValueError("the training data set has no sample")
        self.trainer, self.network, self.optimizer = trainer, trainer.network, trainer.optimizer
        self.communicator = trainer.communicator
        self.train, self.validation, self.report, self.recording = train, validation, report, recording
        self.minibatch, self.checkpoint, self.callback = minibatch, checkpoint, callback
        self.settings, self.loader_options = settings or {}, loader_options
        self.digest_interval = digest_interval or (DIGEST_INTERVAL if trainer.exact else 0)
        self.epochs, self.steps_per_epoch = epochs, -(-len(train) // minibatch)
        self.last_step = epochs * self.steps_per_epoch
        if steps is not None:
            self.last_step = min(self.last_step, steps)
        self.step = 0
        self.result = TrainingResult()

    def execute(self, resume):
        """Train; returns the TrainingResult."""
        start = time.perf_counter()
        self._agree()
        if self.trainer.overlap:
            self.communicator.start_thread()
        plan = self.network.prepare(self.minibatch, self.communicator, self.trainer.threads,
                                    partitions=self.trainer.partitions, exact=self.trainer.exact,
                                    tune=self._tune(resume))
        if plan.tuned:
            self.report.say("tuned: " + ", ".join(f"{layer.name} {format_algorithms(layer.algorithms)}"
                                                  for layer in plan.layers if layer.tuned))
        if resume is not None:
            self._resume(resume)
        self._open_outputs()
        if self.minibatch > len(self.train):
            self.report.warn(f"the minibatch of {self.minibatch:,} is larger than the training set: a step trains on "
                             f"all {len(self.train):,} images, an epoch is one step")
        first_step, images, busy = self.step, 0, 0.0
        loader = Loader(self.train, self.minibatch, seed=self.network.seed, rank=self.communicator.rank,
                        size=self.communicator.size, pieces=plan.pieces, training=True, **self.loader_options)
        with loader:
            epoch, step_in_epoch = divmod(self.step, self.steps_per_epoch)
            clock = time.perf_counter()
            for batch in loader.batches(epoch, step_in_epoch, steps=self.last_step - self.step):
                with self.recording.step(clock):
                    stop = self._step(batch, clock)
                images, busy = images + batch.global_count, busy + time.perf_counter() - clock
                epoch_ends = self.step % self.steps_per_epoch == 0
                if epoch_ends and not stop:     # asked for after the control word had left: validation may take long
                    stop = self._agree_to_stop()
                last = self.step == self.last_step or stop
                if last or epoch_ends:
                    self._between_epochs(batch.epoch, validate=not stop)
                if last:
                    break
                clock = time.perf_counter()
        if self.step == first_step:     # nothing left to do: still say how good it is
            self._between_epochs(max(self.step - 1, 0) // self.steps_per_epoch, validate=True, write=False)
        self.network.finish()
        result = self.result
        result.step, result.epoch = self.step, self.step // self.steps_per_epoch
        result.images_per_s = images / busy if busy else 0.0
        result.seconds = time.perf_counter() - start
        result.metrics_error = self.communicator.broadcast(self.report.metrics_error)
        self.report.finish(result)
        self.recording.finish()
        return result

    def _agree(self):
        """Refuse at the start what would go wrong silently later: ranks that do not run the same thing."""
        if self.validation is not None:
            check_class_map(self.train.class_names, self.validation.class_names, "validation data")
        if self.network.num_classes < self.train.num_classes:
            raise ValueError(f"the network has {self.network.num_classes} outputs, the data {self.train.num_classes} "
                             "classes")
        description = {"pcldnn version": __version__, "SIMD width": _kernels.SIMD_WIDTH, "minibatch": self.minibatch,
                       "steps": self.last_step, "seed": self.network.seed, "checkpoint": self.checkpoint is not None,
                       "optimizer": repr(self.optimizer.description()), "tune": repr(self.trainer.tune)}
        for what, dataset in (("training data", self.train), ("validation data", self.validation)):
            identity = {"present": False} if dataset is None else dataset.identity()
            description.update({f"{what}: {key}": value for key, value in identity.items()})
        self.communicator.agree(description)

    def _open_outputs(self):
        """Rank 0 opens what it will write, so that a wrong path is told before hours of training, not after."""
        problem = None
        if self.communicator.rank == 0:
            try:
                if self.checkpoint is not None:     # first, for the others replace what is there
                    check_writable(self.checkpoint)
                    remove_leftovers(self.checkpoint)
                self.report.start(self.step, self.last_step, self.epochs, self.steps_per_epoch)
                self.recording.open()
            except OSError as error:
                problem = f"cannot write {error.filename!r}: {error.strerror}"
        problem = self.communicator.broadcast(problem)
        if problem is not None:
            raise OutputError(problem)

    def _step(self, batch, clock):
        """One step; returns whether the ranks have agreed to stop after it."""
        loss_sum, _ = self.network.forward_loss(batch.images, batch.labels, batch.sample_ids, batch.epoch,
                                                batch.global_count)
        wants_stop = self.trainer.stop_reason is not None
        control = self.network.start_sum(
            np.array([*self.network.piece_losses, not math.isfinite(loss_sum), wants_stop], np.float64),
            refuses=lambda sums: sums[-2] > 0)
        epoch = self.step / self.steps_per_epoch
        self.network.backward(self.optimizer, epoch)
        *losses, diverged, stop = control()
        loss = float(sum(losses)) / batch.global_count
        if diverged:
            self._diverged(loss, not math.isfinite(loss_sum))
        self.network.update(self.optimizer, epoch)
        self.step += 1
        self.result.losses.append(loss)
        record = {"step": self.step, "epoch": batch.epoch + 1, "loss": loss,
                  "images_per_s": batch.global_count / max(time.perf_counter() - clock, 1e-9)}
        if self.digest_interval and (self.step % self.digest_interval == 0 or self.step == self.last_step):
            layers = layer_digests(self.network, self.optimizer)
            self.communicator.agree({f"weights of layer {name}": digest for name, digest in layers.items()})
            record.update(digest=total_digest(layers), layers=layers, run=self._identity)
        self.report.step(record, batch.global_count)
        if self.callback is not None:
            self.callback(record)
        return bool(stop) and self._agree_to_stop()

    def _agree_to_stop(self):
        """Whether some rank wants to stop, on all ranks; the result then says why."""
        reasons = self.communicator.allgather_object(self.trainer.stop_reason)
        if all(why is None for why in reasons):
            return False
        self.trainer.stop_reason = None
        self.result.stopped = "; ".join(f"rank {rank}: {why}" for rank, why in enumerate(reasons) if why)
        return True

    def _diverged(self, loss, here):
        """Say in which layer it began, on the ranks whose own loss is not finite."""
        found = self.network.find_nonfinite() if here or self.network.is_split else None
        culprits = self.communicator.allgather_object((found or "the loss itself") if here else None)
        raise TrainingDiverged(self.step + 1, loss, {rank: name for rank, name in enumerate(culprits) if name})

    def _between_epochs(self, epoch, validate, write=True):
        if validate and self.validation is not None:
            evaluation = self.result.evaluation = evaluate(self.network, self.communicator, self.validation,
                                                           self.minibatch, self.loader_options)
            record = {"epoch": epoch + 1, "top1": evaluation.top1, "top5": evaluation.top5, "count": evaluation.count}
            self.report.evaluation(record)
            if self.callback is not None:
                self.callback(record)
        if write and self.checkpoint is not None:
            try:
                self._save()
                self.result.checkpoint_error = None
            except CheckpointError as error:
                self.result.checkpoint_error = str(error)
                self.report.warn(f"{error}. Training goes on; an older checkpoint there is untouched.")

    def _save(self):
        whole = self.communicator.rank == 0 or self.network.is_split
        weights = self.network.state_dict() if whole else {}
        shapes = {name: (array.dtype, array.shape) for name, array in weights.items()}
        if self.optimizer.has_state:
            shapes.update({MOMENTUM_PREFIX + name: entry for name, entry in list(shapes.items())})
        batches = itertools.chain([weights], self.optimizer.state_by_layer(self.network))
        save_collective(self.checkpoint, shapes, batches, self._metadata(), self.communicator)

    @functools.cached_property
    def _identity(self):
        return run_identity(self._metadata())

    def _metadata(self):
        return {"pcldnn": __version__, "step": self.step, "epoch": self.step // self.steps_per_epoch,
                "steps_per_epoch": self.steps_per_epoch, "epochs": self.epochs, "minibatch": self.minibatch,
                "seed": self.network.seed, "optimizer": self.optimizer.description(),
                "class_names": list(self.train.class_names), "dataset": self.train.fingerprint(),
                "augment": repr(self.loader_options.get("augment") or self.train.augment),
                "network": network_digest(self.network), "target": _kernels.TARGET,
                "input_shape": list(self.network.input_shape), "ranks": self.communicator.size,
                "pieces": self.network.prepared.pieces, "algorithms": self.network.prepared.algorithms,
                "tuned": self.network.prepared.tuned, "settings": self.settings}

    def _tune(self, resume):
        """What `Network.prepare` takes: in a resumed run the choice that its checkpoint says was timed."""
        if self.trainer.tune is not True or resume is None:
            return self.trainer.tune
        with CollectiveReader(resume, self.communicator) as reader:
            metadata = reader.metadata
        recorded = metadata.get("tuned", {})
        return {name: passes for name, passes in recorded.items() if name in self.network.names} or True

    def _resume(self, path):
        with CollectiveReader(path, self.communicator) as reader:
            metadata = reader.metadata
            tensors = {name: reader.read(name) for name in reader.shapes}
        momentum = {name: tensors.pop(name) for name in list(tensors) if name.startswith(MOMENTUM_PREFIX)}
        try:
            self._check_resume(path, metadata)
            self.network.load_state_dict(tensors)
            if momentum:
                self.optimizer.load_state_dict(momentum, self.network)
        except ValueError as cause:      # the same on every rank: all have read the same file
            raise CollectiveCheckpointError(f"cannot resume from {str(path)!r}: {cause}") from cause
        self.step = metadata.get("step", 0)
        if metadata:
            self.report.say(f"{path}: training goes on after step {self.step}" if self.step < self.last_step else
                            f"{path}: nothing is left to train: it is at step {self.step}, this run ends at step "
                            f"{self.last_step}")

    def _check_resume(self, path, metadata):
        if not metadata:
            self.report.say(f"{path}: weights only (no momentum, no step): training starts at step 1")
            return
        check_class_map(metadata["class_names"], self.train.class_names, "training data")
        if metadata["seed"] != self.network.seed:
            raise ValueError(f"it was trained with seed {metadata['seed']}, this network has {self.network.seed}; "
                             "order, augmentation and dropout would not continue")
        if metadata.get("pieces", 0) != self.network.prepared.pieces:
            self.report.warn(f"{path} was trained with {metadata.get('pieces', 0)} pieces a minibatch (exact mode; 0 "
                             f"is without), this run has {self.network.prepared.pieces}: bits will differ")
        changed = changed_algorithms(metadata.get("algorithms", {}), self.network.prepared.algorithms)
        if changed:
            self.report.warn(f"{path} was trained with other algorithms ({changed}): bits will differ")
        inside = metadata["step"] % metadata["steps_per_epoch"]
        if metadata["steps_per_epoch"] != self.steps_per_epoch:
            if inside:
                raise ValueError(f"it was written inside an epoch, after {inside} of {metadata['steps_per_epoch']} "
                                 f"steps with minibatch {metadata['minibatch']}; this run has {self.steps_per_epoch} "
                                 f"steps an epoch with minibatch {self.minibatch}")
            metadata["step"] = metadata["epoch"] * self.steps_per_epoch
        if metadata["dataset"] != self.train.fingerprint():
            self.report.warn(f"{path} was trained on other data (same classes, different samples)")
