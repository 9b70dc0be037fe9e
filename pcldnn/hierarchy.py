"""Part-reduce and part-broadcast in two levels: shared memory inside a node, messages between nodes.

Each byte crosses the network once a node, not once a rank. A span that leaves its node, or comes to it, is cut in as
many pieces as the node has ranks, and each carries one:

    part-reduce      each rank adds its piece of the span of every rank elsewhere over its own node and sends it to the
                     owner; the owner adds its span over its own node, then what came from the others
    part-broadcast   each owner sends every other node its span once, a piece to each rank; then the ranks of a node
                     copy from each other what each has received and what each owns

The second is the adjoint of the first. Nodes may be of any sizes, shares as uneven as they like.

Design notes
------------
a. Sums inside a node are in the order of ranks, then those of nodes are added in the order of nodes. So the bits depend
   on which ranks share a node, and on nothing else. Exact mode's sums do not come here (exchange.py).
b. A node's sum takes the place of this rank's own values, in a piece that nobody else looks at.
c. Ranks of a node meet while messages of theirs may still need care (MPI may take a message, and move it only in later
   calls): so they look after MPI while they wait for each other.
d. Arrays that do not come from `allocate` pass through one that does.
"""

import numpy as np

from pcldnn.partition import share
from pcldnn.shared import NoSharedMemory, Shared
from pcldnn.transfer import add_arrays

_NEVER_SENT = 29  # a tag


class Hierarchy:
    """Exchanges between the ranks of several nodes; the same methods as `shared.Shared`.

    Parameters
    ----------
    MPI : module
        mpi4py's, handed in so that this file need not import it.
    comm : mpi4py.MPI.Intracomm
    messages : transfer.Messages
        Of the same communicator.
    nodes : nodes.Nodes
        Of the same communicator.
    wait : callable
        `wait(test)` returns once `test()` is true.

    Raises
    ------
    NoSharedMemory
        On all ranks, if it is missing on some node.
    """

    def __init__(self, MPI, comm, messages, nodes, wait):
        self._MPI, self._comm, self._messages, self._wait = MPI, comm, messages, wait
        self._members, self._own = nodes.members, nodes.index
        self._index, self._size = nodes.comm.rank, nodes.comm.size
        self._others = [members for i, members in enumerate(nodes.members) if i != nodes.index]
        self._staging = None
        self._shared = self._on_all_nodes(lambda: Shared(MPI, nodes.comm, self._wait_with_care))

    def allocate(self, count):
        """Zeros, float32 (count,), of this rank; collective, with the same count on all ranks."""
        return self._on_all_nodes(lambda: self._shared.allocate(count))

    def takes(self, parts):
        """True: what does not come from `allocate` is staged. Collective, for memory may be made: NoSharedMemory."""
        needed = 0 if self._shared.takes(parts) else _staged_bytes(parts)
        if needed > (0 if self._staging is None else self._staging.nbytes):
            self._staging = self.allocate(-(-needed // 8) * 2)  # float64 has room there, too
        return True

    def reduce(self, parts):
        """Each rank's own span of each buffer becomes the sum over ranks; the rest is undefined."""
        staged = self._stage(parts, lambda spans: spans)
        self._reduce(staged)
        _copy(staged, parts, lambda spans: [spans[self._comm.rank]])

    def gather(self, parts):
        """Each rank's span of each buffer goes to all others, in place."""
        rank = self._comm.rank
        staged = self._stage(parts, lambda spans: [spans[rank]])
        self._gather(staged)
        _copy(staged, parts, lambda spans: spans[:rank] + spans[rank + 1 :])

    def _reduce(self, parts):
        rank, shared, messages = self._comm.rank, self._shared, self._messages
        arrived = messages.room(parts, len(self._others))
        for rows in arrived:
            for row, members in zip(rows, self._others):
                for i, peer in enumerate(members):
                    messages.receive(row[slice(*share(row.size, len(members), i))], peer)
        shared.meet()
        for buffer, spans in parts:
            for peer in self._peers():
                piece = _piece(spans[peer], self._size, self._index)
                shared.add(buffer, piece)
                messages.send(buffer[slice(*piece)], peer)
        for buffer, spans in parts:
            shared.add(buffer, spans[rank])
        shared.meet()
        messages.finish()
        for (buffer, spans), rows in zip(parts, arrived):
            own = buffer[slice(*spans[rank])]
            add_arrays([*rows[: self._own], own, *rows[self._own :]], own)

    def _gather(self, parts):
        rank, shared, messages = self._comm.rank, self._shared, self._messages
        for buffer, spans in parts:
            for peer in self._peers():
                messages.receive(buffer[slice(*_piece(spans[peer], self._size, self._index))], peer)
        for buffer, spans in parts:
            for members in self._others:
                for i, peer in enumerate(members):
                    messages.send(buffer[slice(*_piece(spans[rank], len(members), i))], peer)
        messages.finish()
        shared.meet()
        for buffer, spans in parts:
            for i in shared.peers():
                shared.copy(buffer, spans[self._members[self._own][i]], i)
                for peer in self._peers():
                    shared.copy(buffer, _piece(spans[peer], self._size, i), i)
        shared.meet()

    def _peers(self):
        """The ranks of other nodes, those of the next one first: so that not all ranks begin with the same one."""
        return [peer for members in self._others[self._own :] + self._others[: self._own] for peer in members]

    def _stage(self, parts, wanted):
        """The parts, in shared memory; of those that are not, the wanted spans are copied there."""
        if self._shared.takes(parts):
            return parts
        staged, used = [], 0
        for buffer, spans in parts:
            start, moved = -(-used // 8) * 8 // buffer.itemsize, []
            for low, high in spans:
                moved.append((start, start + high - low))
                start += high - low
            staged.append((self._staging.view(buffer.dtype), moved))
            used = start * buffer.itemsize
        _copy(parts, staged, wanted)
        return staged

    def _on_all_nodes(self, make):
        made, problem = None, ""
        try:
            made = make()
        except NoSharedMemory as error:
            problem = str(error)
        failed = np.array([bool(problem)], np.int64)
        self._wait(self._comm.Iallreduce(self._MPI.IN_PLACE, failed).Test)
        if failed[0]:
            raise NoSharedMemory(problem or "another node has none")
        return made

    def _wait_with_care(self, test):
        def look():
            return test() or self._comm.Iprobe(self._MPI.ANY_SOURCE, _NEVER_SENT)

        self._wait(look)


def _piece(span, count, index):
    """Piece `index` of `count` of a (start, stop)."""
    low, high = share(span[1] - span[0], count, index)
    return span[0] + low, span[0] + high


def _staged_bytes(parts):
    return sum(8 + sum(stop - start for start, stop in spans) * buffer.itemsize for buffer, spans in parts)


def _copy(sources, targets, wanted):
    """Copy the wanted spans of each part, where the two are not the same."""
    for (source, spans), (target, places) in zip(sources, targets):
        if source is not target:
            for span, place in zip(wanted(spans), wanted(places)):
                target[slice(*place)] = source[slice(*span)]
