"""``python -m pcldnn replay``: compute a window of a recorded run again, on one rank, and find where it parts.

A run in exact mode writes digests of every layer's weights and momentum into its metrics file. From one of its
checkpoints this computes the same steps again. If all digests are equal, so were all bits, on whatever machines the
run was made; if not, the first step and layer that differ are where to look: a broken node, a memory error, another
version of pcldnn, CPUs with other caches.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from pcldnn import _kernels, optim
from pcldnn.arguments import parse
from pcldnn.checkpoint import Reader
from pcldnn.communicator import SerialCommunicator
from pcldnn.digest import run_identity
from pcldnn.plan_table import changed_algorithms
from pcldnn.script import open_data, schedule
from pcldnn.train import Trainer


@dataclass(frozen=True)
class Comparison:
    """What a replay found.

    Attributes
    ----------
    first, last : int
        Steps that were computed.
    compared : int
        Steps with a digest among them.
    step : int or None
        The first one whose digest differs.
    layers : tuple of str
        Layers that differ there, from the input on.
    """

    first: int
    last: int
    compared: int
    step: int | None = None
    layers: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.step is None:
            return f"steps {self.first} to {self.last}: all {self.compared} digests are those of the run"
        layers = ", ".join(self.layers)
        return f"step {self.step} differs, first in layer {self.layers[0]} (all that differ: {layers})"


def recorded_digests(metrics, after: int) -> dict[int, dict]:
    """Records with digests in a metrics file, by step, of the steps behind step `after`."""
    found = {}
    with open(metrics, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
            except ValueError:
                raise ValueError(f"metrics: line {number} of {str(metrics)!r} is not JSON") from None
            if record.get("step", 0) > after and "layers" in record:
                found[record["step"]] = record
    return found


def _check_same_run(checkpoint, metadata, metrics, wanted):
    """Refuse records of a run that has to differ. A resumed run goes on with the identity, unless settings changed."""
    here = run_identity(metadata)
    for step, record in wanted.items():
        if "run" not in record:
            raise ValueError(f"metrics: step {step} in {str(metrics)!r} does not say of which run it is; wanted records "
                             "of this version of pcldnn")  # fmt: skip
        there = record["run"]
        different = [f"{name} {there.get(name)} (checkpoint: {here[name]})" for name in here
                     if there.get(name) != here[name] and name != "algorithms"]  # fmt: skip
        changed = changed_algorithms(here["algorithms"] or {}, there.get("algorithms") or {})
        different += [f"algorithms (checkpoint: {changed} in the metrics)"] if changed else []
        if different:
            raise ValueError(f"metrics: step {step} in {str(metrics)!r} is not of the run of checkpoint "
                             f"{str(checkpoint)!r}: {'; '.join(different)}. Wanted the metrics file that was written "
                             "beside the checkpoint, and the settings unchanged since (--steps N looks no further)")  # fmt: skip


def replay(job, checkpoint, metrics, steps: int | None = None, threads: int | None = None) -> Comparison:
    """Train on from `checkpoint` in this process, by its settings, and compare with the digests in `metrics`.

    Parameters
    ----------
    job : Job
        Of the script that made the run.
    checkpoint, metrics : path
    steps : int, optional
        At most so many; default: as far as there are digests.
    threads : int, optional

    Raises
    ------
    ValueError
        When there is no digest to compare with, those in `metrics` are of a run with another seed, network, data,
        ... than that of the checkpoint, or this process computes by another ISA or other algorithms.
    """
    communicator = SerialCommunicator()
    with Reader(checkpoint) as reader:
        metadata = reader.metadata
    start = metadata.get("step", 0)
    wanted = recorded_digests(metrics, start)
    if steps is not None:
        wanted = {step: record for step, record in wanted.items() if step <= start + steps}
    if not wanted:
        raise ValueError(f"metrics: {str(metrics)!r} has no digest of a step behind step {start}, where the checkpoint "
                         "was written; digests are written with --exact or --digest-interval")  # fmt: skip
    _check_same_run(checkpoint, metadata, metrics, wanted)
    target = metadata.get("target", _kernels.TARGET)
    if target != _kernels.TARGET:
        raise ValueError(f"checkpoint: {str(checkpoint)!r} is of a run with {target}, got {_kernels.TARGET} here, whose "
                         f"sums have another order; wanted PCLDNN_ISA={target}")  # fmt: skip
    args = parse(job, ["--resume", str(checkpoint), "--single-process"], communicator, prog="replay")
    train, _ = open_data(job, args)
    if train.fingerprint() != metadata["dataset"]:
        raise ValueError(f"data: {train.name} is not what the checkpoint {str(checkpoint)!r} was trained on")
    network = job.build(train.num_classes, train.sample_shape, args.dropout, args.seed)
    trainer = Trainer(network, optim.SGD(schedule(args), args.momentum, args.weight_decay), communicator, threads,
                      exact=args.exact, tune=args.tune)  # fmt: skip
    found = []

    def compare(record):
        step = record.get("step")
        if step in wanted:
            changed = not found and changed_algorithms(metadata.get("algorithms", {}), network.prepared.algorithms)
            if changed:
                raise ValueError(f"checkpoint: {str(checkpoint)!r} is of a run with other algorithms ({changed}); wanted "
                                 "the same PCLDNN_CONV, and exact mode if it had several ranks")  # fmt: skip
            got = record["layers"]
            differing = tuple(name for name in got if got[name] != wanted[step]["layers"].get(name))
            found.append(Comparison(start + 1, step, len(found) + 1, step if differing else None, differing))
            if differing:
                trainer.request_stop(str(found[-1]))

    trainer.fit(train, minibatch=args.minibatch, epochs=args.epochs, steps=max(wanted), resume=checkpoint,
                digest_interval=1, verbose=False, callback=compare, skip_damaged=args.skip_damaged)  # fmt: skip
    return next((each for each in found if each.step is not None), found[-1])
