"""What a Communicator promises beside its sums; for 2 or more ranks under mpirun.  Prints `OK` once."""

import numpy as np
from mpi4py import MPI

from pcldnn import communicator
from pcldnn.communicator import Communicator, DisagreementError


def disagreements(comm):
    """A18: all ranks raise the same error, with item, values and ranks, and can go on afterwards."""
    last = comm.size - 1
    comm.agree({"minibatch": 64, "shape": (3, 32, 32), "rate": 0.1})
    cases = [
        ({"lr": 0.1, "fc6": 500 + (comm.rank == last)}, "fc6", {"500": [*range(last)], "501": [last]}),
        ({"a": 1} if comm.rank < last else {"a": 1, "b": 2}, "b", {"(missing)": [*range(last)], "2": [last]}),
        ({"a": comm.rank, "b": comm.rank}, "a", {str(rank): [rank] for rank in range(comm.size)}),
    ]
    for description, item, values in cases:
        try:
            comm.agree(description)
        except DisagreementError as error:
            assert error.item == item, error
            assert error.values == values, error
            assert all(text in str(error) for text in (item, *values)), error
            assert len(set(comm.allgather_object(str(error)))) == 1
            assert error.raised_on_all_ranks
        else:
            raise AssertionError(f"{item}: no error")
    comm.agree({})


def sub_communicators(world):
    """A library user's communicators: split ones, of any size, with the user's own messages under way."""
    rank, size = world.rank, world.size
    half = world.Split(rank % 2, -rank)  # the ranks in reverse order
    mine = np.full(3, rank, np.float32)
    theirs = np.empty(3, np.float32)
    requests = [world.Isend(mine, (rank + 1) % size), world.Irecv(theirs, (rank - 1) % size)]
    with Communicator(half) as comm:
        assert (comm.rank, comm.size) == (half.rank, half.size)
        buffer = np.full(comm.size, rank, np.float32)
        comm.reduce_scatter(buffer, [1] * comm.size)
        comm.allgather(buffer, [1] * comm.size)
        assert (buffer == sum(range(rank % 2, size, 2))).all()
        with comm.abort_on_error():
            comm.barrier()
    comm.close()  # a second time: nothing
    MPI.Request.Waitall(requests)
    assert (theirs == (rank - 1) % size).all()
    half.Barrier()  # the user's communicator is still theirs
    half.Free()

    some = world.Split(0 if rank == 0 else MPI.UNDEFINED)
    if rank == 0:
        with Communicator(some) as comm:
            assert comm.size == 1
        some.Free()
    else:
        refused(lambda: Communicator(some), "comm")
    refused(lambda: Communicator(3), "comm")
    for _ in range(50):  # communicators are a limited resource
        Communicator(world).close()


def bad_arguments(comm):
    """Each rank refuses by itself, before anything is sent."""
    good = np.zeros(10, np.float32)
    shares = [10] + [0] * (comm.size - 1)
    for method in (comm.reduce_scatter, comm.allgather):
        refused(lambda m=method: m(good, shares[:-1]), "shares")
        refused(lambda m=method: m(good, [9] + shares[1:]), "shares")
        refused(lambda m=method: m(good, [11, -1] + shares[2:]), "shares")
        refused(lambda m=method: m(good[::2], shares), "buffer")
        refused(lambda m=method: m(good.astype(int), shares), "buffer")
        refused(lambda m=method: m(good.reshape(2, 5), shares), "buffer")
    refused(lambda: comm.allreduce_sum([1.0]), "array")
    refused(lambda: comm.agree({"weights": good}), "description")


def refused(call, argument):
    try:
        call()
    except ValueError as error:
        assert str(error).startswith(argument), error
        assert "got" in str(error) and "wanted" in str(error), error
    else:
        raise AssertionError(f"{argument}: not refused")


def places(comm):
    """One node here, and all of it described."""
    assert (comm.node_rank, comm.node_size, comm.nodes) == (comm.rank, comm.size, 1)
    assert comm.node_cores >= 1
    assert 1 <= comm.ranks_sharing_cores <= comm.size
    assert comm.library.split()[0] in ("MPICH", "Open", "Intel"), comm.library
    assert comm.thread_level in ("single", "funneled", "serialized", "multiple")
    warning = comm.oversubscription(threads=comm.node_cores)
    assert "oversubscribed" in warning and f"{comm.size} ranks" in warning
    assert len(set(comm.allgather_object(warning))) == 1
    assert (comm.oversubscription(1) is None) == (comm.size <= comm.node_cores)


if __name__ == "__main__":
    with communicator.create() as comm, comm.abort_on_error():
        for check in (disagreements, bad_arguments, places):
            check(comm)
            comm.barrier()
        sub_communicators(MPI.COMM_WORLD)
        with comm.abort_on_error():  # may be nested
            comm.barrier()
        if comm.rank == 0:
            print("OK")
