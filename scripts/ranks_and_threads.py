#!/usr/bin/env python3
"""One process per core against one process with as many threads: the same training step, in turn; for mpirun.

    mpirun -n 3 python scripts/ranks_and_threads.py              # VGG-A: 2 ranks of 1 thread, 1 process of 2 threads
    mpirun -n 3 python scripts/ranks_and_threads.py --network cd_dnn --minibatch 1024

The last process has the threads, the others are ranks of one thread that exchange gradients. They take turns of a few
steps, so that both meet the same machine: with somebody else on the cores, two runs one after the other differ by more
than what is looked for. Who has no turn sleeps. Above 100 % the ranks are faster.
"""

import argparse
import statistics
import time

import numpy as np
from mpi4py import MPI

from pcldnn import SGD, communicator
from pcldnn.grid import image_shares
from pcldnn.models import NETWORKS
from pcldnn.script import describe_spread


def training(name, minibatch, comm, threads, steps):
    """A function that does `steps` training steps on the ranks of `comm`, and the Plan."""
    net = NETWORKS[name]()
    plan = net.prepare(minibatch, comm, threads)
    optimizer = SGD(1e-4, momentum=0.9, weight_decay=5e-4)
    counts = image_shares(minibatch, comm.size, plan.pieces)
    first, count = sum(counts[: comm.rank]), counts[comm.rank]
    images = np.random.default_rng(comm.rank).standard_normal((count, *net.input_shape), dtype=np.float32)
    ids = np.arange(first, first + count)

    def turn():
        for _ in range(steps):
            net.forward_loss(images, ids % net.num_classes, ids, global_count=minibatch)
            net.backward(optimizer)
            net.update(optimizer)
        net.finish()

    return turn, plan


def measure(everyone, turn, mine, turns):
    """Seconds of each turn of both sides, as rank 0 sees them: (ranks, threads), the first turn left out."""
    found = [], []
    for i in range(turns + 1):
        for side in (0, 1):
            everyone.barrier()
            start = time.perf_counter()
            if side == mine:
                turn()
            everyone.barrier()
            if i > 0:
                found[side].append(time.perf_counter() - start)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=sorted(NETWORKS), default="vgg_a", help="(default %(default)s)")
    parser.add_argument("--minibatch", type=int, default=32, metavar="N", help="on all ranks (default %(default)s)")
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="of a turn (default %(default)s)")
    parser.add_argument("--turns", type=int, default=9, metavar="N", help="of each side (default %(default)s)")
    args = parser.parse_args()
    world = MPI.COMM_WORLD
    cores = world.size - 1
    if cores < 2:
        raise SystemExit(f"error: got {world.size} process(es), wanted one more than ranks: mpirun -n 3 or more")
    threaded = world.rank == cores
    # An error on either side ends both: the other would wait for its turn for ever.
    with communicator.create() as everyone, everyone.abort_on_error(), \
            communicator.create(world.Split(threaded, world.rank)) as comm:
        comm.start_thread()
        turn, plan = training(args.network, args.minibatch, comm, cores if threaded else 1, args.steps)
        ranks, threads = measure(everyone, turn, threaded, args.turns)
        if world.rank == 0:
            report(plan, args, cores, ranks, threads)


def report(plan, args, cores, ranks, threads):
    """Images per second of both sides, and the ratio of each turn."""
    print(f"{args.network}, minibatch {args.minibatch}, {describe_spread(plan)}")
    for side, seconds in ((f"{cores} x 1", ranks), (f"1 x {cores}", threads)):
        rates = sorted(args.minibatch * args.steps / each for each in seconds)
        print(f"{side}: median {statistics.median(rates):.2f} images/s, {rates[0]:.2f} to {rates[-1]:.2f}")
    ratios = sorted(100 * b / a for a, b in zip(ranks, threads))
    print(f"{cores} x 1 against 1 x {cores}, turn by turn: median {statistics.median(ratios):.0f} %, "
          f"{ratios[0]:.0f} to {ratios[-1]:.0f} %")  # fmt: skip


if __name__ == "__main__":
    main()
