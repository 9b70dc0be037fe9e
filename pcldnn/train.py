"""The training loop: the same minibatches, the same losses and the same decisions on any number of ranks.

A step is ``forward_loss``, ``backward`` (each layer's gradient goes to its owners as soon as it is there) and
``update`` (owners apply SGD, new weights come back): Network does these. What this file adds is what must be agreed
upon between ranks:

(a) The loss of a step is the sum over all samples of all ranks divided by their number, never a mean of means.
(b) A control word travels with the loss: whether some rank's loss is not finite, whether some rank wants to stop.
    So all ranks leave the loop after the same step, for the same reason.
(c) An error that every rank knows and concludes alike (`faults.CollectiveError`) is raised as an ordinary exception
    on all of them. Whatever happens on one rank alone ends the whole job, with its traceback: the others would wait
    for it for ever.
(d) Evaluation adds up integers: hits and samples. Each sample counts once, on any number of ranks.
"""
import dataclasses
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
from pcldnn.communicator import create
from pcldnn.data import Loader, check_class_map
from pcldnn.digest import layer_digests, total_digest
from pcldnn.faults import CollectiveError
from pcldnn.plan_table import format_algorithms
from pcldnn.recording import Recording
from pcldnn.report import Report
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


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation, over all ranks: integers, so it does not depend on the number of ranks.

    Attributes
    ----------
    count : int
        Samples evaluated, each once.
    correct1, correct5 : int
        Samples whose label has the largest logit, one of the five largest.
    """
    count: int
    correct1: int
    correct5: int

    @property
    def top1(self):
        """Share of `count`, 0..1 (NaN without samples)."""
        return self.correct1 / self.count if self.count else math.nan

    @property
    def top5(self):
        return self.correct5 / self.count if self.count else math.nan


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
    checkpoint_error : str or None
        Why the last checkpoint could not be written.
    """
    step: int = 0
    epoch: int = 0
    losses: list = dataclasses.field(default_factory=list)
    evaluation: Evaluation = None
    images_per_s: float = 0.0
    seconds: float = 0.0
    stopped: str = None
    checkpoint_error: str = None


class Trainer:
    """Trains and evaluates a network, alone or with the other ranks of a communicator.

    Parameters
    ----------
    network : Network
    optimizer : SGD
    communicator : Communicator, optional
        Of any mpi4py communicator of your own program: ``Communicator(comm)``. All its ranks must make the same
        calls. Default: all ranks of the MPI job, or this process where there is no MPI.
    threads : int, optional
        Compute threads of this rank. Default: the cores that this rank may use, shared with the ranks beside it.
    overlap : bool
        Exchange beside compute, on a communication thread (`Communicator.start_thread`). Changes no bit of the result.
    partitions : dict of str to Partition, optional
        How convolutions and fully connected layers are spread over ranks; default: as the plan chooses (`plan.plan`).
    exact : bool or int
        Exact mode: weights and losses do not depend, to the last bit, on ranks, threads and partitions.
    tune : bool or dict
        Time convolutions once and compute each in the quickest way: see `Network.prepare`. A checkpoint keeps the
        choice, and a resumed run that is tuned takes it from there.
    """

    def __init__(self, network, optimizer, communicator=None, threads=None, *, overlap=True, partitions=None,
                 exact=False, tune=False):
        self.network, self.optimizer = network, optimizer
        self.partitions, self.exact, self.tune = partitions, exact, tune
        self.communicator = create() if communicator is None else communicator
        self.threads, self.overlap = threads, overlap
        self._stop_reason = None

    def request_stop(self, reason="requested"):
        """Ask all ranks to stop, one step later at most. One rank is enough; safe in a signal handler."""
        self._stop_reason = reason

    def fit(self, train, validation=None, *, minibatch, epochs=1, steps=None, checkpoint=None, resume=None,
            metrics=None, trace=None, profile=False, log_interval=10, digest_interval=None, verbose=True,
            progress_bar=None, callback=None, settings=None, **loader_options):
        """Train; collective.

        Parameters
        ----------
        train, validation : Dataset
            `validation` is evaluated after each epoch and at the end.
        minibatch : int
            Images per step over all ranks (global minibatch).
        epochs : int
            Passes over `train`.
        steps : int, optional
            Stop after so many steps in total, should the epochs not end before. Does not change the schedule.
        checkpoint : path, optional
            Written by rank 0 after each epoch and at the end. A failure to write it is reported, not fatal.
        resume : path, optional
            Checkpoint to go on from, or a plain state dict to start from; only rank 0 reads it.
        metrics : path, optional
            JSONL file, written by rank 0: a line per step (keys step, epoch, loss, images_per_s) and per evaluation
            (keys epoch, top1, top5, count; top1 and top5 as shares of count). Steps and epochs count from 1. A
            resumed run goes on in the same file.
        trace : path, optional
            A timeline of all ranks for a trace viewer (Chrome, Perfetto), and a summary of the communication.
        profile : bool
            Print time, flop/s and bytes/s by layer and pass at the end.
        log_interval : int
            Steps between printed lines.
        digest_interval : int, optional
            Steps between records with `digest`, the SHA-256 of all weights and momentum, and `layers`, that of each
            layer, by which `replay` finds where two runs part. Default: `DIGEST_INTERVAL` in exact mode, else never.
        verbose : bool
            Rank 0 prints lines, and a bar if standard error is a terminal (`progress_bar` overrides that).
        callback : callable, optional
            Called on every rank as ``callback(record)`` with each record of the metrics file (the loss is the
            same on all ranks, images_per_s is of this rank's clock). It may call `request_stop`.
        settings : dict, optional
            Kept in the checkpoint for whoever resumes it.
        **loader_options
            `augment`, `threads` (decoding), `prefetch`, `skip_damaged` of `data.Loader`.

        Returns
        -------
        TrainingResult

        Raises
        ------
        TrainingDiverged, CheckpointError, DisagreementError
            On all ranks together. Any other exception on some rank ends the whole MPI job.
        """
        agreed = None
        with self.communicator.abort_on_error():
            rank0 = self.communicator.rank == 0
            report = Report(printing=verbose and rank0, bar=progress_bar, metrics=metrics if rank0 else None,
                            interval=log_interval)
            with report:
                try:
                    with Recording(self.network, self.communicator, trace, profile, report) as recording:
                        run = _Run(self, train, validation, minibatch, epochs, steps, checkpoint, callback, report,
                                   recording, settings or {}, loader_options)
                        run.digest_interval = digest_interval or (DIGEST_INTERVAL if self.exact else 0)
                        result = run.execute(resume)
                        self.network.join()     # so that what a rank asks of it later does not depend on the others
                        return result
                except Exception as error:
                    if not getattr(error, "raised_on_all_ranks", False):
                        raise
                    agreed = error
        raise agreed    # outside of the block: no reason to end a user's whole MPI job

    def evaluate(self, dataset, minibatch=256, **loader_options):
        """Classify each sample of `dataset` once; collective.

        Returns
        -------
        Evaluation
            Over all ranks, the same on each.
        """
        with self.communicator.abort_on_error():
            return self._evaluate(dataset, minibatch, loader_options)

    def _evaluate(self, dataset, minibatch, loader_options):
        communicator = self.communicator
        counts = np.zeros(3)    # samples, correct1, correct5: integers, exact in float64
        options = {name: loader_options[name] for name in ("threads", "prefetch", "skip_damaged")
                   if name in loader_options}
        with Loader(dataset, minibatch, rank=communicator.rank, size=communicator.size, training=False,
                    **options) as loader:
            for batch in loader.epoch(0):
                if len(batch.labels) or self.network.is_split:     # then all ranks work on each image
                    ranking = rank_of_label(self.network.forward(batch.images), batch.labels)
                    counts += len(ranking), (ranking < 1).sum(), (ranking < 5).sum()
        count, correct1, correct5 = (int(n) for n in communicator.allreduce_sum(counts))
        return Evaluation(count, correct1, correct5)


def rank_of_label(logits, labels):
    """How many classes come before the right one; of equal logits the first class wins, NaN never does.

    Returns
    -------
    int array (N,)
        0 is a top-1 hit, below 5 a top-5 hit.
    """
    own = logits[np.arange(len(labels)), labels][:, None]
    earlier = np.arange(logits.shape[1]) < np.asarray(labels)[:, None]
    before = ((logits > own) | ((logits == own) & earlier)).sum(axis=1)
    return np.where(np.isfinite(own[:, 0]), before, logits.shape[1] + 5)


class _Run:
    """One call of `Trainer.fit`: its position, and what happens at each step and epoch."""

    def __init__(self, trainer, train, validation, minibatch, epochs, steps, checkpoint, callback, report,
                 recording, settings, loader_options):
        for name, value, least in (("minibatch", minibatch, 1), ("epochs", epochs, 0), ("steps", steps or 0, 0)):
            if int(value) != value or value < least:
                raise ValueError(f"{name} = {value!r}, wanted an integer of at least {least}")
        if len(train) == 0:
            raise ValueError("the training data set has no sample")
        self.trainer, self.network, self.optimizer = trainer, trainer.network, trainer.optimizer
        self.communicator = trainer.communicator
        self.train, self.validation, self.report, self.recording = train, validation, report, recording
        self.minibatch, self.checkpoint, self.callback = minibatch, checkpoint, callback
        self.settings, self.loader_options = settings, loader_options
        self.epochs, self.steps_per_epoch = epochs, -(-len(train) // minibatch)
        self.last_step = epochs * self.steps_per_epoch
        if steps is not None:
            self.last_step = min(self.last_step, steps)
        self.step = self.digest_interval = 0
        self.result = TrainingResult()

    def execute(self, resume):
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
                    self._between_epochs(batch.epoch, evaluate=not stop)
                if last:
                    break
                clock = time.perf_counter()
        if self.step == first_step:     # nothing left to do: still say how good it is
            self._between_epochs(max(self.step - 1, 0) // self.steps_per_epoch, evaluate=True, write=False)
        self.network.finish()
        result = self.result
        result.step, result.epoch = self.step, self.step // self.steps_per_epoch
        result.images_per_s = images / busy if busy else 0.0
        result.seconds = time.perf_counter() - start
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
        wants_stop = self.trainer._stop_reason is not None
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
            record.update(digest=total_digest(layers), layers=layers)
        self.report.step(record, batch.global_count)
        if self.callback is not None:
            self.callback(record)
        return bool(stop) and self._agree_to_stop()

    def _agree_to_stop(self):
        """Whether some rank wants to stop, on all ranks; the result then says why."""
        reasons = self.communicator.allgather_object(self.trainer._stop_reason)
        if all(why is None for why in reasons):
            return False
        self.trainer._stop_reason = None
        self.result.stopped = "; ".join(f"rank {rank}: {why}" for rank, why in enumerate(reasons) if why)
        return True

    def _diverged(self, loss, here):
        """Say in which layer it began, on the ranks whose own loss is not finite."""
        found = self.network.find_nonfinite() if here or self.network.is_split else None
        culprits = self.communicator.allgather_object((found or "the loss itself") if here else None)
        raise TrainingDiverged(self.step + 1, loss, {rank: name for rank, name in enumerate(culprits) if name})

    def _between_epochs(self, epoch, evaluate, write=True):
        if evaluate and self.validation is not None:
            options = self.loader_options
            self.result.evaluation = evaluation = self.trainer._evaluate(self.validation, self.minibatch, options)
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

    def _metadata(self):
        return {"pcldnn": __version__, "step": self.step, "epoch": self.step // self.steps_per_epoch,
                "steps_per_epoch": self.steps_per_epoch, "epochs": self.epochs, "minibatch": self.minibatch,
                "seed": self.network.seed, "optimizer": self.optimizer.description(),
                "class_names": list(self.train.class_names), "dataset": self.train.fingerprint(),
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
        planned = self.network.prepared.algorithms
        changed = [f"{name} {format_algorithms(passes)}, now {format_algorithms(planned[name])}"
                   for name, passes in metadata.get("algorithms", planned).items()
                   if passes != planned.get(name, passes)]
        if changed:
            self.report.warn(f"{path} was trained with other algorithms ({'; '.join(changed)}): bits will differ")
        inside = metadata["step"] % metadata["steps_per_epoch"]
        if metadata["steps_per_epoch"] != self.steps_per_epoch:
            if inside:
                raise ValueError(f"it was written inside an epoch, after {inside} of {metadata['steps_per_epoch']} "
                                 f"steps with minibatch {metadata['minibatch']}; this run has {self.steps_per_epoch} "
                                 f"steps an epoch with minibatch {self.minibatch}")
            metadata["step"] = metadata["epoch"] * self.steps_per_epoch
        if metadata["dataset"] != self.train.fingerprint():
            self.report.warn(f"{path} was trained on other data (same classes, different samples)")
