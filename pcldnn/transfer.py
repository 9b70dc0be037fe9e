"""Part-reduce and part-broadcast of pieces of arrays by direct messages between all ranks.

Every rank sends each other rank the part that this one owns, and adds what it receives, in the order of ranks. That
moves n(p-1)/p elements a rank, the least there is (Patarasuk and Yuan), at a latency of p-1 messages that are all under way
at once. The order of additions depends neither on how an array is cut in pieces nor on how the parts travel, so
results are the same bits in every schedule; with a reduction of the MPI library they would not be.

A part of an exchange is `(buffer, spans)`: a flat array and the (start, stop) of what each rank owns in it. Several
parts in one call are one exchange: small layers share a latency.
"""

import numpy as np

from pcldnn.partition import bounds, share

_TAG = 23


def piece_spans(shares, index=0, count=1):
    """(start, stop) of piece `index` of `count` of every rank's share."""
    spans = []
    for rank, size in enumerate(shares):
        start, (low, high) = bounds(shares, rank)[0], share(size, count, index)
        spans.append((start + low, start + high))
    return spans


def add_arrays(arrays, out):
    """out = arrays[0] + arrays[1] + ... in this order; `out` may be one of them. float32 or float64."""
    # Not at the top: a rank that cannot load its kernels must still be able to end the job (`guard_imports`).
    from pcldnn import _kernels as kernels
    from pcldnn._kernels import reference

    module = kernels if out.dtype == np.float32 else reference
    module.sum_arrays(arrays, out)


class Direct:
    """Messages between the ranks of an MPI communicator.

    Parameters
    ----------
    MPI : module
        mpi4py's, handed in so that this file need not import it.
    comm : mpi4py.MPI.Intracomm
    wait : callable
        `wait(test)` returns once `test()` is true.
    """

    def __init__(self, MPI, comm, wait):
        self._MPI, self._comm, self._wait = MPI, comm, wait
        self._scratch = np.empty(0, np.uint8)

    def reduce(self, parts):
        """Each rank's own span of each buffer becomes the sum over ranks; the rest stays as it is."""
        rank = self._comm.rank
        incoming = self._incoming(parts)
        received = [{peer: array for peer, array in zip(self._peers(), arrays)} for arrays in incoming]
        self._move(
            [(buffer[slice(*spans[peer])], peer) for buffer, spans in parts for peer in self._peers()],
            [(arrays[peer], peer) for arrays in received for peer in self._peers()],
        )
        for (buffer, spans), arrays in zip(parts, received):
            own = buffer[slice(*spans[rank])]
            add_arrays([arrays.get(peer, own) for peer in range(self._comm.size)], own)

    def gather(self, parts):
        """Each rank's span of each buffer goes to all others, in place."""
        rank = self._comm.rank
        self._move(
            [(buffer[slice(*spans[rank])], peer) for buffer, spans in parts for peer in self._peers()],
            [(buffer[slice(*spans[peer])], peer) for buffer, spans in parts for peer in self._peers()],
        )

    def _peers(self):
        """The others, nearest first: so that not all ranks begin with the same one."""
        return [(self._comm.rank + distance) % self._comm.size for distance in range(1, self._comm.size)]

    def _incoming(self, parts):
        """Memory for what the peers send: for each part one array a peer."""
        rank, peers = self._comm.rank, self._comm.size - 1
        sizes = [spans[rank][1] - spans[rank][0] for _, spans in parts]
        needed = sum(size * buffer.itemsize for size, (buffer, _) in zip(sizes, parts)) * peers
        if needed > self._scratch.nbytes:
            self._scratch = np.empty(needed, np.uint8)
        arrays, start = [], 0
        for size, (buffer, _) in zip(sizes, parts):
            stop = start + size * buffer.itemsize * peers
            arrays.append(self._scratch[start:stop].view(buffer.dtype).reshape(peers, size))
            start = stop
        return arrays

    def _move(self, sends, receives):
        # Empty messages are left out on both sides alike. Between two ranks messages keep their order.
        requests = [self._comm.Irecv(array, peer, _TAG) for array, peer in receives if array.size]
        requests += [self._comm.Isend(array, peer, _TAG) for array, peer in sends if array.size]
        if requests:
            self._wait(lambda: self._MPI.Request.Testall(requests))
