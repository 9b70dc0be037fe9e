"""One process without MPI, and at the same time the interface of all communicators."""

import os
import socket

import numpy as np

from . import launcher
from .commthread import Commands
from .faults import AbortOnError


class SerialCommunicator(Commands):
    """One process without MPI; the same interface as `Communicator`.

    Attributes
    ----------
    rank, size : int
    node_rank, node_size : int
        Index of this rank among those of its node, and their number.
    node, nodes : int
        Index of this rank's node, and the number of nodes.
    node_cores : int
        Cores that the ranks of this node may use together (union of their affinity masks).
    ranks_sharing_cores : int
        Ranks of this node, this one included, that may run on a core on which this one may run.
    transport : str
        How float arrays travel, in words: "shared memory", with or without messages between nodes, or "messages of
        ..." and why.
    library, thread_level : str
        The MPI library and its thread support (`single`, `funneled`, `serialized`, `multiple`).
    note : str
        Why this process is alone, when it is.
    """

    rank = 0
    size = 1
    node_rank = 0
    node_size = 1
    node, nodes = 0, 1
    ranks_sharing_cores = 1
    transport = "nothing"
    library = "none"
    thread_level = "none"

    def __init__(self, note=""):
        self.note = note
        self._grids = {}
        self.node_cores = len(os.sched_getaffinity(0))

    def __repr__(self):
        return f"{type(self).__name__}(rank={self.rank}, size={self.size}, library={self.library!r})"

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        # After an error the other ranks may be elsewhere: freeing is collective and could wait for ever.
        if error is None:
            self.close()
        return False

    def close(self):
        """Free what the communicator holds; the user's own communicator stays."""

    def start_thread(self, reserve=0):
        """Hand all messages to a communication thread, beside compute; kept until `close`.

        Parameters
        ----------
        reserve : int
            Cores to take away from the calling thread, and from those it starts later, for this one, which spins
            there. 0: it runs on compute's cores, and sleeps there while it waits.

        Returns
        -------
        str
            What was done, or why there is no such thread (then exchanges block), for the user.
        """
        return "one rank exchanges nothing"

    def allocate(self, count):
        """Zeros, float32 (count,), in memory from which exchanges are fast; collective."""
        from .layout import aligned_zeros  # loads the kernels: see `guard_imports`

        return aligned_zeros(count)

    def bandwidth(self):
        """What an exchange moves from each rank [byte/s], measured once, the same number on all ranks; collective."""
        return float("inf")

    def part_reduce(self, parts):
        """`reduce_scatter` of spans of several arrays in one exchange; see transfer.py."""

    def part_broadcast(self, parts):
        """`allgather` of spans of several arrays in one exchange; see transfer.py."""

    def reduce_scatter(self, buffer, shares):
        """Part-reduce: add the buffers of all ranks; each rank gets the sum of its own share, in place.

        Parameters
        ----------
        buffer : ndarray, float32 or float64, 1-D, contiguous
            IN: what this rank adds.  OUT: `buffer[start:stop]` of this rank's share holds the sum over
            ranks; the rest is undefined (on one rank the buffer stays as it is).
        shares : sequence of int
            Elements owned by each rank, in order of rank; may differ and may be 0; the same on every rank.
        """
        check_shares(buffer, shares, self.size)

    def allgather(self, buffer, shares):
        """Part-broadcast: every rank gives its own share of `buffer` to all others, in place.

        The adjoint of `reduce_scatter`; arguments as there.  OUT: all of `buffer`.
        """
        check_shares(buffer, shares, self.size)

    def exchange(self, sends, receives):
        """Send arrays to ranks and receive arrays from ranks, all at once.

        Parameters
        ----------
        sends, receives : list of list of ndarray, float32 or float64, contiguous
            One list a rank. What rank r lists for rank s arrives in what s lists for r, array by array: their
            sizes must be the same on both sides. An array that is empty does not travel.
        """
        check_exchange(sends, receives, self.size)
        for source, target in zip(sends[self.rank], receives[self.rank], strict=True):
            target.reshape(-1)[:] = source.reshape(-1)

    def split(self, color):
        """The communicator of the ranks with the same integer `color`, in their order here; `close` frees it, too."""
        return SerialCommunicator()

    def grid(self, partition):
        """The data and the model communicator of this rank in a grid of ranks; made once, kept until `close`.

        Parameters
        ----------
        partition : Partition
            With as many ranks as this communicator.

        Returns
        -------
        data : communicator
            Of the ranks that hold the same part of the weights: gradients are added over them.
        model : communicator
            Of the ranks of this rank's group: activations travel between them.
        """
        if partition.ranks != self.size:
            raise ValueError(f"partition: got {partition}, wanted data times model = {self.size}, the number of ranks")
        if partition not in self._grids:
            group, member = partition.place(self.rank)
            alone = SerialCommunicator()
            data = self if partition.model == 1 else alone if partition.data == 1 else self.split(member)
            model = self if partition.data == 1 else alone if partition.model == 1 else self.split(group)
            self._grids[partition] = data, model
        return self._grids[partition]

    def allreduce_sum(self, array):
        """Add `array` (a small ndarray of numbers) over the ranks, in place; returns it."""
        return check_small(array)

    def broadcast(self, value, root=0):
        """The `value` (any picklable object) of rank `root`, on every rank."""
        return value

    def gather(self, value, root=0):
        """On rank `root` the list of every rank's `value`, elsewhere None."""
        return [value]

    def allgather_object(self, value):
        """On every rank the list of every rank's `value`."""
        return [value]

    def barrier(self):
        """Wait until every rank is here."""

    def abort(self, code=1):
        """End the job at once with exit code `code`; may be called by one rank alone."""
        os._exit(code)

    def agree(self, description):
        """Check that `description` is the same on every rank.

        Parameters
        ----------
        description : dict of str to object
            Named values whose `repr` tells them apart: numbers, strings, tuples, lists.  Arrays are
            refused; give a digest.

        Raises
        ------
        DisagreementError
            On every rank, the same: names the item, the values, and the ranks that hold each.
        """
        as_texts(description)

    def abort_on_error(self):
        """Context manager: an error in its block, on any rank and in any thread, ends the whole job.

        An exception, a `sys.exit` that not all ranks call, or an exception in another thread is printed
        once, with the number of the rank, and the job is aborted with a non-zero exit code.  The ranks
        leave the block together: at its end each waits for the others.  In a job of one process errors
        propagate as usual; one in another thread is raised in the main thread.
        """
        return AbortOnError(None)

    def oversubscription(self, threads, cores=None):
        """A warning when the ranks of a node run more threads than they have cores; else None.

        The same on every rank.

        Parameters
        ----------
        threads : int
            Compute threads of this rank.
        cores : int, optional
            Cores that the job may use on this node, where something else than affinity limits it (a cgroup
            quota).
        """
        limit = self.node_cores if cores is None else min(self.node_cores, cores)
        own = (socket.gethostname(), self.node, threads, limit, len(os.sched_getaffinity(0)))
        return launcher.oversubscription_warning(self.allgather_object(own))


def as_texts(description):
    for name, value in description.items():
        if isinstance(value, np.ndarray):
            raise ValueError(f"description[{name!r}]: got an array, wanted a digest of it")  # noqa: TRY004
    return {str(name): repr(value) for name, value in description.items()}


def check_shares(buffer, shares, size):
    if not isinstance(buffer, np.ndarray) or buffer.ndim != 1 or not buffer.flags.c_contiguous:
        raise ValueError(f"buffer: got {_shape(buffer)}, wanted a contiguous 1-D array")
    if buffer.dtype not in (np.float32, np.float64):
        raise ValueError(f"buffer: got {buffer.dtype}, wanted float32 or float64")
    if len(shares) != size:
        raise ValueError(f"shares: got {len(shares)} shares, wanted one for each of the {size} ranks")
    if min(shares) < 0 or sum(shares) != buffer.size:
        raise ValueError(
            f"shares: got {list(shares)} (sum {sum(shares)}), wanted counts >= 0 that sum to {buffer.size}"
        )


def check_exchange(sends, receives, size):
    for name, lists in (("sends", sends), ("receives", receives)):
        if len(lists) != size:
            raise ValueError(f"{name}: got {len(lists)} lists, wanted one for each of the {size} ranks")
        wrong = [array for arrays in lists for array in arrays if not array.flags.c_contiguous]
        if wrong:
            raise ValueError(f"{name}: got {_shape(wrong[0])}, wanted contiguous arrays")


def check_small(array):
    if not isinstance(array, np.ndarray) or not array.flags.c_contiguous or array.dtype.kind not in "fiu":
        raise ValueError(f"array: got {_shape(array)}, wanted a contiguous array of numbers")
    return array


def _shape(value):
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}, strides {value.strides}, {value.dtype}"
    return type(value).__name__
