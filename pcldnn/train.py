"""Training and evaluation of a network, as a user calls them. What happens meanwhile: run.py, evaluation.py."""
from pcldnn.communicator import create
from pcldnn.evaluation import Evaluation, evaluate, rank_of_label
from pcldnn.recording import Recording
from pcldnn.report import Report
from pcldnn.run import OutputError, Run, TrainingDiverged, TrainingResult

__all__ = ["Evaluation", "OutputError", "Trainer", "TrainingDiverged", "TrainingResult", "rank_of_label"]


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
        self.stop_reason = None     # of this rank, until all have agreed to stop

    def request_stop(self, reason="requested"):
        """Ask all ranks to stop, one step later at most. One rank is enough; safe in a signal handler."""
        self.stop_reason = reason

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
            resumed run goes on in the same file. One that cannot be written on (a full disk) is told, and in
            `TrainingResult.metrics_error`; training goes on.
        trace : path, optional
            A timeline of all ranks for a trace viewer (Chrome, Perfetto), and a summary of the communication.
        profile : bool
            Print time, flop/s and bytes/s by layer and pass at the end.
        log_interval : int
            Steps between printed lines.
        digest_interval : int, optional
            Steps between records with `digest`, the SHA-256 of all weights and momentum, and `layers`, that of each
            layer, by which `replay` finds where two runs part, and `run`, what decides the numbers of this one (seed,
            network, data, ...). Default: `run.DIGEST_INTERVAL` in exact mode, else never.
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
                        run = Run(self, train, validation, minibatch=minibatch, epochs=epochs, steps=steps,
                                  checkpoint=checkpoint, digest_interval=digest_interval, callback=callback,
                                  report=report, recording=recording, settings=settings,
                                  loader_options=loader_options)
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
            return evaluate(self.network, self.communicator, dataset, minibatch, loader_options)
