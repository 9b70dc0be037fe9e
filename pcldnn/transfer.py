"""Part-reduce and part-broadcast of pieces of arrays by direct messages between all ranks.

Every rank sends each other rank the part that this one owns, and adds what it receives, in the order of ranks. That
moves n(p-1)/p elements a rank, the least there is (Patarasuk and Yuan), at a latency of p-1 messages that are all under
way at once. The order of additions does not depend on how an array is cut in pieces, so results are the same bits in
every schedule; with a reduction of the MPI library they would not be.

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


def segments(shares, limit):
    """Cut an exchange of uneven shares in consecutive pieces of at most `limit` elements.

    Yields
    ------
    begin, end : int
        The piece of the buffer.
    counts : list of int
        The elements of each rank's share that lie in it.
    """
    starts = np.concatenate([[0], np.cumsum(shares, dtype=np.int64)])
    for begin in range(0, int(starts[-1]), limit):
        end = min(begin + limit, int(starts[-1]))
        inside = np.clip(starts, begin, end)
        yield begin, end, np.diff(inside).tolist()


def cut(arrays, limit):
    """The arrays, flat, in messages of at most `limit` elements."""
    for array in arrays:
        flat = array.reshape(-1)
        for begin in range(0, flat.size, limit):
            yield flat[begin : begin + limit]


def add_arrays(arrays, out):
    """out = arrays[0] + arrays[1] + ... in this order; `out` may be one of them. float32 or float64."""
    # Not at the top: a rank that cannot load its kernels must still be able to end the job (`guard_imports`).
    from pcldnn import _kernels as kernels
    from pcldnn._kernels import reference

    module = kernels if out.dtype == np.float32 else reference
    module.sum_arrays(arrays, out)


class Messages:
    """Arrays on their way from and to other ranks; those between two ranks keep their order.

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
        self._requests = []
        self._scratch = np.empty(0, np.uint8)

    def receive(self, array, peer):
        """Begin to receive; an empty message is left out on both sides alike."""
        if array.size:
            self._requests.append(self._comm.Irecv(array, peer, _TAG))

    def send(self, array, peer):
        """Begin to send; leave the array alone until `finish`."""
        if array.size:
            self._requests.append(self._comm.Isend(array, peer, _TAG))

    def finish(self):
        """Wait until all that was begun has arrived and left."""
        requests, self._requests = self._requests, []
        if requests:
            self._wait(lambda: self._MPI.Request.Testall(requests))

    def room(self, parts, senders):
        """Memory for what arrives of this rank's spans: for each part an array (senders, size)."""
        spans = [spans[self._comm.rank] for _, spans in parts]
        bytes_of = [(stop - start) * buffer.itemsize * senders for (start, stop), (buffer, _) in zip(spans, parts)]
        if sum(bytes_of) > self._scratch.nbytes:
            self._scratch = np.empty(sum(bytes_of), np.uint8)
        ends = np.cumsum(bytes_of)
        return [
            self._scratch[end - size : end].view(buffer.dtype).reshape(senders, stop - start)
            for end, size, (start, stop), (buffer, _) in zip(ends, bytes_of, spans, parts)
        ]


class Direct:
    """Exchanges by messages between each two ranks of an MPI communicator.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
    messages : Messages
        Of the same communicator.
    """

    def __init__(self, comm, messages):
        self._comm, self._messages = comm, messages

    def reduce(self, parts):
        """Each rank's own span of each buffer becomes the sum over ranks; the rest is undefined."""
        rank, peers, messages = self._comm.rank, self._peers(), self._messages
        arrived = [dict(zip(peers, room)) for room in messages.room(parts, len(peers))]
        for arrays in arrived:
            for peer in peers:
                messages.receive(arrays[peer], peer)
        for buffer, spans in parts:
            for peer in peers:
                messages.send(buffer[slice(*spans[peer])], peer)
        messages.finish()
        for (buffer, spans), arrays in zip(parts, arrived):
            own = buffer[slice(*spans[rank])]
            add_arrays([arrays.get(peer, own) for peer in range(self._comm.size)], own)

    def gather(self, parts):
        """Each rank's span of each buffer goes to all others, in place."""
        rank, messages = self._comm.rank, self._messages
        for buffer, spans in parts:
            for peer in self._peers():
                messages.receive(buffer[slice(*spans[peer])], peer)
        for buffer, spans in parts:
            for peer in self._peers():
                messages.send(buffer[slice(*spans[rank])], peer)
        messages.finish()

    def _peers(self):
        """The others, nearest first: so that not all ranks begin with the same one."""
        return [(self._comm.rank + distance) % self._comm.size for distance in range(1, self._comm.size)]
