#!/usr/bin/env python3
"""Count on the wire what fully connected layers send in each Partition, beside the formula of `scaling.grid_bytes`.

The ranks are hosts of an emulated cluster (emulated_cluster.py), so what their interfaces count is all they send. A run
of a few steps is subtracted from a longer one: what remains are steps. Data parallel is the first line, hybrid
partitions follow, model parallel is the last.

    sudo python scripts/wire_volume.py --hosts 4 --minibatch 64 --widths 4096 4096 1000
"""

import argparse
import sys
from itertools import pairwise
from pathlib import Path

import emulated_cluster
import numpy as np

from pcldnn import SGD, Linear, Network, ReLU, Trainer, communicator
from pcldnn.arguments import partitions
from pcldnn.data import ArrayDataset
from pcldnn.layout import FLOAT
from pcldnn.scaling import grid_bytes

WARM = 2  # steps of the run that is subtracted


def worker(args):
    """A training run, on every rank."""
    with communicator.create() as comm, comm.abort_on_error():
        random = np.random.default_rng(0)
        count, features, classes = 2 * args.minibatch, args.widths[0], args.widths[-1]
        frames = random.standard_normal((count, features), np.float32)
        data = ArrayDataset(frames, random.integers(0, classes, count), classes)
        layers = [part for pair in pairwise(args.widths) for part in (Linear(*pair, bias=False), ReLU())][:-1]
        trainer = Trainer(Network(layers, (features,)), SGD(0.01), comm, 1, partitions=partitions(args.partition))
        trainer.fit(data, minibatch=args.minibatch, epochs=args.steps, steps=args.steps, verbose=False)


def formula(groups, args):
    """What a rank sends in a step [byte]; nobody needs the gradient of the first layer's input."""
    sizes = [(ifm, ofm) for ifm, ofm in pairwise(args.widths)]
    total = sum(grid_bytes(groups, args.hosts, args.minibatch, ifm, ofm, ifm * ofm) for ifm, ofm in sizes)
    return total - FLOAT * args.widths[0] * args.minibatch / groups * (1 - groups / args.hosts)


def counted(groups, args):
    """The same, mean over ranks, as the interfaces counted it."""
    sent = []
    for steps in (WARM, WARM + args.steps):
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", "--minibatch", args.minibatch,
                   "--steps", steps, "--widths", *args.widths,
                   "--partition", f"fc={groups}x{args.hosts // groups}"]  # fmt: skip
        with emulated_cluster.network(args.hosts, args.rate, "128kb") as names:
            if emulated_cluster.launch(names, [str(word) for word in command], 1, args.timeout):
                sys.exit("error: the run failed")
            sent.append(sum(map(emulated_cluster.sent, names)) / len(names))
    return (sent[1] - sent[0]) / args.steps


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4, metavar="N", help="(default %(default)s)")
    parser.add_argument("--minibatch", type=int, default=64, metavar="N", help="of all ranks (default %(default)s)")
    parser.add_argument("--widths", type=int, nargs="+", default=[4096, 4096, 1000], metavar="N", help=(
        "inputs, outputs of each layer (default: the last two layers of VGG-A)"))
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="that are counted (default %(default)s)")
    parser.add_argument("--rate", default="1gbit", help="of each host, each way (default %(default)s)")
    parser.add_argument("--timeout", type=float, default=300, metavar="S", help="[s] of a run (default %(default)s)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--partition", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args)
    if problem := emulated_cluster.missing():
        parser.error(problem)
    layers = "-".join(map(str, args.widths))
    print(f"layers {layers}, minibatch {args.minibatch}, {args.hosts} ranks; sent by a rank in a step:")
    print(f"{'partition':<12} {'on the wire':>12} {'formula':>12} {'excess':>8}   "
          "less than data parallel, and by the formula")
    first = None
    for groups in range(args.hosts, 0, -1):
        if args.hosts % groups == 0:
            found, wanted = counted(groups, args), formula(groups, args)
            first = first or (found, wanted)
            print(f"{f'{groups}x{args.hosts // groups}':<12} {found / 1e6:>9.3f} MB {wanted / 1e6:>9.3f} MB "
                  f"{100 * (found / wanted - 1):>+6.1f} %   {first[0] / found:.2f}x, {first[1] / wanted:.2f}x",
                  flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
