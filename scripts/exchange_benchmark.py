#!/usr/bin/env python3
"""Our part-reduce and part-broadcast against MPI's Reduce_scatter and Allgather; to be run under mpirun.

    mpirun -n 2 python scripts/exchange_benchmark.py --megabytes 1 16 64
    PCLDNN_NODES=2+2 mpirun -n 4 python scripts/exchange_benchmark.py      # as if these were two nodes

All in the same run, in turn, float32. A time is the median over repeats of the slowest rank's; a rate is the bytes that
must arrive at each rank, n (p-1)/p, by that time. MPI is measured as it is called everywhere, blocking, and (with
--polite) non-blocking with sleeps between tests, which on fewer cores than ranks is much faster. "two levels" is shared
memory inside nodes and messages between them; "messages" goes from each rank to each other one.
"""

import argparse
import time

import numpy as np

from pcldnn import communicator
from pcldnn.commthread import Idle
from pcldnn.partition import shares


def contestants(comm, count, polite):
    """Name -> (reduce_scatter, allgather), functions without arguments."""
    owned = list(shares(count, comm.size))
    shared, plain, theirs = comm.allocate(count), np.zeros(count, np.float32), np.zeros(count, np.float32)
    mpi, in_place, idle = comm._comm, comm._MPI.IN_PLACE, Idle()

    def waited(request):
        idle(request.Test)

    def directly(method):
        for parts in comm._pieces(plain, owned):
            method(parts)

    found = {}
    if comm.transport.startswith("shared memory"):
        name = "pcldnn, shared memory" if comm.nodes == 1 else "pcldnn, two levels"
        found[name] = (lambda: comm.reduce_scatter(shared, owned), lambda: comm.allgather(shared, owned))
    found["pcldnn, messages"] = (lambda: directly(comm._direct.reduce), lambda: directly(comm._direct.gather))
    found[comm.library] = (
        lambda: mpi.Reduce_scatter(in_place, theirs, owned),
        lambda: mpi.Allgatherv(in_place, [theirs, owned]),
    )
    if polite:
        found[f"{comm.library}, polite"] = (
            lambda: waited(mpi.Ireduce_scatter(in_place, theirs, owned)),
            lambda: waited(mpi.Iallgatherv(in_place, [theirs, owned])),
        )
    return found


def measure(comm, function, repeats):
    """Median [s] of the slowest rank's times."""
    function()
    times = np.zeros((repeats, comm.size))
    for i in range(repeats):
        comm.barrier()
        start = time.perf_counter()
        function()
        times[i, comm.rank] = time.perf_counter() - start
    return float(np.median(comm.allreduce_sum(times).max(axis=1)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[1, 4, 16, 64], metavar="MB",
                        help="sizes of the whole array, in 2^20 bytes (default: 1 4 16 64)")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="(default %(default)s)")
    parser.add_argument("--polite", action="store_true", help="MPI non-blocking with sleeps, too")
    args = parser.parse_args()
    with communicator.create() as comm, comm.abort_on_error():
        if comm.size == 1:
            raise SystemExit("error: one rank exchanges nothing; start it with mpirun -n 2 or more")
        if comm.rank == 0:
            print(f"{comm.size} ranks on {comm.nodes} node(s); ours by default: {comm.transport}")
            print(f"{'MB':>7}  {'':28}{'reduce_scatter':>24}{'allgather':>24}")
        for megabytes in args.megabytes:
            count = int(megabytes * 2**20) // 4
            for name, functions in contestants(comm, count, args.polite).items():
                times = [measure(comm, function, args.repeats) for function in functions]
                rates = [4 * count * (comm.size - 1) / comm.size / seconds / 1e9 for seconds in times]
                if comm.rank == 0:
                    cells = "".join(f"{1e3 * t:12,.2f} ms {r:5.2f} GB/s" for t, r in zip(times, rates))
                    print(f"{megabytes:7g}  {name:28}{cells}", flush=True)


if __name__ == "__main__":
    main()
