"""Every exchange of the Communicator against NumPy, on random shapes; for any number of ranks under mpirun.

Rank 0 draws the cases with hypothesis and sends them to the others, so that all ranks see the same one also
while a failing case is being shrunk; whether a case holds is decided together.
"""

import sys

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pcldnn import communicator

EXAMPLES = 40


def numbers(case, rank, count, dtype):
    """This rank's part of the case: integers, so that every order of summation gives the same sum."""
    return np.random.default_rng([case["seed"], rank]).integers(-1000, 1000, count).astype(dtype)


def holds(comm, case):
    """True when the exchanges are right for `case` on this rank."""
    shares, dtype = case["shares"], np.dtype(case["dtype"])
    total, start = sum(shares), sum(shares[: comm.rank])
    comm.max_count = total // case["pieces"] + 1 if case["pieces"] else communicator.MAX_COUNT
    stop = start + shares[comm.rank]
    everyone = [numbers(case, rank, total, dtype) for rank in range(comm.size)]
    right = []

    # Of float32, half of the cases in memory of the communicator.
    allocated = dtype == np.float32 and case["seed"] % 2
    x = comm.allocate(total) if allocated else np.empty(total, dtype)
    x[:] = everyone[comm.rank]
    comm.reduce_scatter(x, shares)
    right.append(np.array_equal(x[start:stop], sum(everyone)[start:stop]))

    y = comm.allocate(total) if allocated else np.empty(total, dtype)
    y[:] = np.nan
    y[start:stop] = everyone[0][start:stop]
    comm.allgather(y, shares)
    right.append(np.array_equal(y, everyone[0]))

    right.append(adjoint(comm, shares, everyone[comm.rank], start, stop))

    s = everyone[comm.rank].astype(np.float64)
    expected = sum(each.astype(np.float64) for each in everyone)
    right.append(comm.allreduce_sum(s) is s and np.array_equal(s, expected))

    root = case["seed"] % comm.size
    # Short, for the limit counts bytes here.
    all_objects = [{"rank": rank, "data": each.tobytes()[: total // 2]} for rank, each in enumerate(everyone)]
    own = all_objects[comm.rank]
    right.append(comm.allgather_object(own) == all_objects)
    right.append(comm.gather(own, root) == (all_objects if comm.rank == root else None))
    right.append(comm.broadcast(own if comm.rank == root else None, root) == all_objects[root])
    return all(right)


def adjoint(comm, shares, x, start, stop):
    """<F x, y> = <x, F* y> for F = reduce_scatter, F* = allgather; x is on all ranks, y in shares."""
    y = np.zeros_like(x)
    y[start:stop] = np.arange(start, stop) % 17 - 8
    forward = x.copy()
    comm.reduce_scatter(forward, shares)
    backward = y.copy()
    comm.allgather(backward, shares)
    exact = np.float64  # products and sums of these integers are exact in it
    left = np.dot(forward[start:stop].astype(exact), y[start:stop].astype(exact))
    right = np.dot(x.astype(exact), backward.astype(exact))
    left, right = comm.allreduce_sum(np.array([left, right]))
    return left == right


def together(comm, case):
    case = comm.broadcast(case)
    if case is None:
        return None
    limit = comm.max_count
    try:
        good = holds(comm, case)
    finally:
        comm.max_count = limit
    return comm.allreduce_sum(np.array([int(good)]))[0] == comm.size


def main(comm):
    if comm.rank > 0:
        while together(comm, None) is not None:
            pass
        return

    share = st.one_of(st.just(0), st.integers(0, 5), st.integers(0, 3000))
    cases = st.fixed_dictionaries({
        "shares": st.lists(share, min_size=comm.size, max_size=comm.size),
        "dtype": st.sampled_from(["float32", "float64"]),
        "pieces": st.integers(0, 5),  # 0: one message; otherwise about as many as that
        "seed": st.integers(0, 1000),
    })

    @settings(max_examples=EXAMPLES, deadline=None, database=None, derandomize=True,
              suppress_health_check=list(HealthCheck))
    @given(cases)
    def check(case):
        assert together(comm, case), f"wrong result for {case}"

    check()
    comm.broadcast(None)
    print(f"collectives hold on {comm.size} ranks of {comm.library}", file=sys.stdout)


if __name__ == "__main__":
    with communicator.create() as comm, comm.abort_on_error():
        main(comm)
