"""Ranks and the messages between them.

The words of Das et al. 2016: *part-reduce* is `reduce_scatter`, *part-broadcast* is `allgather`.  A layer's
gradients are part-reduced to their owners, each owner updates its shard, and the weights are
part-broadcast.

Design notes
------------
a. A `Communicator` works on its own duplicate of the given mpi4py communicator, so its messages never meet
   those of the program around it.
b. Every wait is a non-blocking MPI call and `faults.wait`: it does not steal the core of a rank that
   computes, and signals are handled. After `start_thread` all messages are the communication thread's
   business (commthread.py); blocking calls wait for it.
c. Counts are cut to `max_count` elements a message, far below 2^31-1, where the `int` counts of MPI-3 end.
d. Sums of float arrays are our own: in the order of ranks (transfer.py, shared.py), between nodes of several ranks
   by nodes (hierarchy.py). The MPI library adds only small ones.
e. All methods but `abort` are collective: every rank of the communicator calls them, in the same order.
"""

import contextlib
import hashlib
import os
import pickle
import sys
import time

import numpy as np

from . import launcher, mpi
from .commthread import CommunicationThread, on_thread
from .faults import AbortOnError, Channel, CollectiveError, DisagreementError, Refusal, is_plain, wait  # noqa: F401
from .hierarchy import Hierarchy
from .nodes import Nodes
from .serial import SerialCommunicator, as_texts, check_shares, check_small
from .shared import NoSharedMemory, Shared
from .transfer import Direct, Messages, cut, piece_spans, segments

# 1 GiB of float32.  Not 2^31-1, because some MPI libraries multiply counts by the size of an element in an
# int.
MAX_COUNT = 2**28
PIECE = 2**22  # elements of a float array that travel at a time; bounds the memory for what is received
_PROBE = 2**20  # elements of the exchange that measures the bandwidth
_EXCHANGE_TAG = 7


class LaunchError(RuntimeError):
    """The launcher started several tasks, but MPI sees one."""


def create(comm=None, single_process=False):
    """The communicator of this process: over MPI where MPI is there, else of this process alone.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        Default: all processes of the job.
    single_process : bool
        Ask for a process on its own: no MPI is started and what the launcher says is not looked at.

    Raises
    ------
    LaunchError
        When a launcher started several tasks and MPI sees one: N copies would overwrite each other's files.
    """
    if comm is not None:
        return Communicator(comm)
    if single_process:
        return SerialCommunicator("a single process was asked for")
    try:
        MPI = mpi.load()
    except mpi.NoMPIError as error:
        message = launcher.mismatch(None)
        if message:
            raise LaunchError(message) from error
        return SerialCommunicator(str(error))
    if MPI.COMM_WORLD.size == 1:
        message = launcher.mismatch(mpi.library(MPI))
        if message:
            raise LaunchError(message)
    return Communicator()


@contextlib.contextmanager
def guard_imports():
    """Context manager for the first imports of a program that is started under mpirun.

    MPI is not started yet, and a rank that fails there, say because its CPU lacks the ISA that was asked for,
    would leave the others waiting in MPI's own start (MPICH).  So it starts MPI, too, and ends the job.
    An ISA that cannot be had is told in one line, with exit code 2.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001  raised again, or told
        end = Refusal(str(error)) if is_plain(error) else error
        found = launcher.launches()
        if found and found[0].tasks > 1:
            # Where MPI cannot say who waits, nobody does.
            with contextlib.suppress(LaunchError), create() as comm, comm.abort_on_error():
                raise end
        if end is not error:
            print(f"error: {error}", file=sys.stderr)
        raise end


class Communicator(SerialCommunicator):
    """Ranks of an MPI job.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        Any communicator of the program around; it is duplicated.  Default `MPI.COMM_WORLD`.
    max_count : int
        Longest message [elements]; longer exchanges go in pieces.
    """

    def __init__(self, comm=None, max_count=MAX_COUNT):
        MPI = mpi.load()
        if comm is None:
            comm = MPI.COMM_WORLD
        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            raise ValueError(
                f"comm: got {comm!r}, wanted an intra-communicator of mpi4py that this process belongs to"
                " (only the ranks inside a sub-communicator may build a Communicator on it)"
            )
        if max_count < 1:
            raise ValueError(f"max_count: got {max_count}, wanted at least 1")
        super().__init__()
        self._MPI = MPI
        self._comm = comm.Dup()
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)  # errors become exceptions
        self._channel = Channel(MPI, comm.Dup()) if MPI.COMM_WORLD.size > 1 else None
        self._parts = []
        self.max_count = max_count
        self.rank = comm.rank
        self.size = comm.size
        self.library = mpi.library(MPI)
        self.thread_level = mpi.thread_level(MPI)
        self._messages = Messages(MPI, self._comm, self._wait_for)
        self._direct = Direct(self._comm, self._messages)
        self._bandwidth = None
        self._nodes = nodes = Nodes(MPI, self._comm)
        self.node_rank, self.node_size, self.node_cores = nodes.comm.rank, nodes.comm.size, nodes.cores
        self.node, self.nodes, self.ranks_sharing_cores = nodes.index, len(nodes.members), nodes.sharing
        self._shared, self.transport = self._choose_transport()

    def start_thread(self, reserve=0):
        """See `SerialCommunicator.start_thread`."""
        if self.size == 1:
            return super().start_thread(reserve)
        if self.thread_level != "multiple":
            return (
                f"exchanges block: MPI was started with thread level {self.thread_level}, a communication thread needs"
                " MPI_THREAD_MULTIPLE (mpi4py's default)"
            )
        if self.thread is None:
            self._thread = CommunicationThread(self._reserve(reserve) if reserve else ())
        if self.thread.cores:
            return f"a communication thread on core {', '.join(map(str, sorted(self.thread.cores)))}"
        return "a communication thread on compute's cores"

    def _reserve(self, count):
        """Leave the last cores to the communication threads of all ranks that share them; this rank's are returned."""
        cores = sorted(os.sched_getaffinity(0))
        left = len(cores) - count * self.ranks_sharing_cores
        if left < 1:
            raise ValueError(
                f"reserve: got {count} cores for each of {self.ranks_sharing_cores} ranks, wanted fewer than the"
                f" {len(cores)} cores on which they compute"
            )
        os.sched_setaffinity(0, cores[:left])
        first = left + count * self._nodes.sharing_index
        return cores[first : first + count]

    def _choose_transport(self):
        """Shared memory inside nodes where all ranks can, else messages alone; the choice, and in words."""
        messages = f"messages of {self.library}"
        if self.size == 1:
            return None, "nothing"
        allowed = os.environ.get("PCLDNN_SHM", "1") != "0"
        if self.allreduce_sum(np.array([allowed], np.int64))[0] < self.size:
            return None, f"{messages} (PCLDNN_SHM=0)"
        if self.nodes == self.size:
            return None, f"{messages} ({self.nodes} nodes)"
        try:
            if self.nodes == 1:
                return Shared(self._MPI, self._comm, self._wait_for), "shared memory"
            levels = Hierarchy(self._MPI, self._comm, self._messages, self._nodes, self._wait_for)
            return levels, f"shared memory inside each of {self.nodes} nodes, {messages} between them"
        except NoSharedMemory as error:
            return None, f"{messages} (no shared memory: {error})"

    @on_thread
    def allocate(self, count):
        """In shared memory, if there is any; see `SerialCommunicator.allocate`."""
        if self._shared is not None:
            try:
                return self._shared.allocate(count)
            except NoSharedMemory as error:
                self._leave_shared_memory(error)
        from .layout import aligned_zeros  # loads the kernels: see `guard_imports`

        return aligned_zeros(count)

    def _transfer(self, parts):
        try:
            if self._shared is not None and self._shared.takes(parts):
                return self._shared
        except NoSharedMemory as error:
            self._leave_shared_memory(error)
        return self._direct

    def _leave_shared_memory(self, error):
        """On all ranks, for `error` is raised on all."""
        self._shared, self.transport = None, f"messages of {self.library} (no more shared memory: {error})"
        if self.rank == 0:
            print(f"warning: exchanges go on with {self.transport}", file=sys.stderr, flush=True)

    def close(self):
        """Free the duplicates (collective); a second call does nothing."""
        if self._MPI.Is_finalized():
            return
        self.stop_thread()
        for part in self._parts:
            part.close()
        self._parts, self._grids = [], {}
        for comm in (self._comm, self._nodes.comm, self._channel and self._channel.comm):
            if comm:
                comm.Free()

    @on_thread
    def reduce_scatter(self, buffer, shares):
        """Part-reduce over the ranks; see `SerialCommunicator.reduce_scatter`."""
        check_shares(buffer, shares, self.size)
        if self.size == 1:
            return
        for parts in self._pieces(buffer, shares):
            self.part_reduce(parts)

    @on_thread
    def allgather(self, buffer, shares):
        """Part-broadcast to the ranks; see `SerialCommunicator.allgather`."""
        check_shares(buffer, shares, self.size)
        if self.size == 1:
            return
        for parts in self._pieces(buffer, shares):
            self.part_broadcast(parts)

    @on_thread
    def part_reduce(self, parts):
        """Spans of arrays to their owners; see `SerialCommunicator.part_reduce`."""
        self._transfer(parts).reduce(parts)

    @on_thread
    def part_broadcast(self, parts):
        """Spans of arrays from their owners; see `SerialCommunicator.part_broadcast`."""
        self._transfer(parts).gather(parts)

    def _pieces(self, buffer, shares):
        count = -(-buffer.size // min(PIECE, self.max_count))
        return ([(buffer, piece_spans(shares, index, count))] for index in range(count))

    @on_thread
    def bandwidth(self):
        """Measured once; see `SerialCommunicator.bandwidth`."""
        if self._bandwidth is None and self.size > 1:
            shares = [_PROBE // self.size] * self.size
            buffer, times = self.allocate(sum(shares)), []
            for _ in range(3):
                self.barrier()
                start = time.perf_counter()
                self.allgather(buffer, shares)
                times.append(time.perf_counter() - start)
            moved = buffer.nbytes * (self.size - 1) / self.size
            self._bandwidth = self.broadcast(moved / sorted(times)[1])
        return self._bandwidth or float("inf")

    @on_thread
    def exchange(self, sends, receives):
        """Arrays between ranks; see `SerialCommunicator.exchange`."""
        super().exchange(sends, receives)
        # The peer at distance 1 first, then at distance 2, ...: not all ranks at the same one.
        order = [(self.rank + distance) % self.size for distance in range(1, self.size)]
        requests = [self._comm.Irecv(piece, peer, _EXCHANGE_TAG) for peer in reversed(order)
                    for piece in cut(receives[peer], self.max_count)]  # fmt: skip
        requests += [self._comm.Isend(piece, peer, _EXCHANGE_TAG) for peer in order
                     for piece in cut(sends[peer], self.max_count)]  # fmt: skip
        self._wait_for(lambda: self._MPI.Request.Testall(requests))

    @on_thread
    def split(self, color):
        """A communicator of some of the ranks; see `SerialCommunicator.split`. Collective over all."""
        comm = self._comm.Split(color, self.rank)
        try:
            part = Communicator(comm, self.max_count)
        finally:
            comm.Free()
        part.parent = self  # one thread for all, and one order of commands
        self._parts.append(part)
        return part

    @on_thread
    def allreduce_sum(self, array):
        """Sum over the ranks; see `SerialCommunicator.allreduce_sum`."""
        check_small(array)
        if self.size > 1:
            self._wait(self._comm.Iallreduce(self._MPI.IN_PLACE, array))
        return array

    @on_thread
    def broadcast(self, value, root=0):
        """Any object to all; see `SerialCommunicator.broadcast`."""
        if self.size == 1:
            return value
        data = np.frombuffer(pickle.dumps(value), np.uint8) if self.rank == root else None
        count = np.array([0 if data is None else data.size], np.int64)
        self._wait(self._comm.Ibcast(count, root))
        if data is None:
            data = np.empty(count[0], np.uint8)
        for begin in range(0, data.size, self.max_count):
            self._wait(self._comm.Ibcast(data[begin : begin + self.max_count], root))
        return value if self.rank == root else pickle.loads(data)

    @on_thread
    def gather(self, value, root=0):
        """Any objects to one; see `SerialCommunicator.gather`."""
        values = self.allgather_object(value if self.rank != root else None)
        if self.rank != root:
            return None
        values[root] = value
        return values

    @on_thread
    def allgather_object(self, value):
        """Any objects to all; see `SerialCommunicator.allgather_object`."""
        if self.size == 1:
            return [value]
        own = np.frombuffer(pickle.dumps(value), np.uint8)
        counts = np.zeros(self.size, np.int64)
        counts[self.rank] = own.size
        self.allreduce_sum(counts)
        ends = np.cumsum(counts)
        data = np.empty(ends[-1], np.uint8)
        data[ends[self.rank] - own.size : ends[self.rank]] = own
        for begin, end, part in segments(counts.tolist(), self.max_count):
            self._wait(self._comm.Iallgatherv(self._MPI.IN_PLACE, [data[begin:end], part]))
        return [pickle.loads(data[end - count : end]) for end, count in zip(ends, counts)]

    @on_thread
    def barrier(self):
        """Wait until every rank is here."""
        self._wait(self._comm.Ibarrier())

    def abort(self, code=1):
        """End the whole job, also the ranks outside this communicator."""
        self._MPI.COMM_WORLD.Abort(code)

    @on_thread
    def agree(self, description):
        """Check equality over the ranks; see `SerialCommunicator.agree`."""
        texts = as_texts(description)
        digest = hashlib.sha256(repr(sorted(texts.items())).encode()).digest()
        if self._equal_everywhere(digest):
            return
        # The rare way: which item, then who holds what.
        digests = {name: hashlib.sha256(text.encode()).digest() for name, text in texts.items()}
        items = self.allgather_object(digests)
        names = list(dict.fromkeys(name for each in items for name in each))
        differing = [name for name in names if len({each.get(name) for each in items}) > 1]
        item = differing[0]
        holders = {}
        for rank, text in enumerate(self.allgather_object(texts.get(item, "(missing)"))):
            holders.setdefault(text, []).append(rank)
        raise DisagreementError(item, holders, differing[1:])

    def _equal_everywhere(self, digest):
        # All ranks hold the same number when its minimum and its maximum are equal; min(~x) = ~max(x).
        words = np.frombuffer(digest, np.int64)
        both = np.concatenate([words, ~words])
        self._wait(self._comm.Iallreduce(self._MPI.IN_PLACE, both, self._MPI.MIN))
        return np.array_equal(both[: words.size], ~both[words.size :])

    def abort_on_error(self):
        """An error on any rank ends the job; see `SerialCommunicator.abort_on_error`."""
        return AbortOnError(self._channel)

    def _wait(self, request):
        self._wait_for(request.Test)

    def _wait_for(self, test):
        if self.thread is not None and self.thread.is_current:
            self.thread.idle(test)
        else:
            wait(test)
