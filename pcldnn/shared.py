"""Part-reduce and part-broadcast inside a node: ranks read each other's arrays, nothing is sent.

Arrays come from `allocate`. Each rank's array is memory of its own that all ranks of the node have mapped; a rank sums
its span from all ranks' arrays where they lie, with our own vectorised loop, in the order of ranks, and copies other
ranks' spans from where they lie.

Design notes
------------
a. Memory is `memfd_create` of the owner, opened by the others through /proc, not a window of MPI: it goes away with the
   last array that uses it, also when a process is killed, and not with the communicator, after which a network's
   weights are still used. It does not need space in /dev/shm, which containers cut to 64 MB. Each rank touches its own
   memory first, so it lies near that rank's cores.
b. Ranks meet by counters in such memory, looked at with pauses: on the communication thread the core is compute's.
   Before an exchange they meet because all arrays must be ready; after it because all must have been read. Data are
   written and read under the counters in this order, by fences: ARM, unlike x86, may turn it round, and Python's lock
   is no barrier where nobody lets it go.
c. Whatever fails, all ranks agree to fall back to messages, with the reason.
"""

import mmap
import os
import weakref

import numpy as np

from pcldnn.transfer import add_arrays

_HEADER = mmap.PAGESIZE  # [byte] before the data: identity, counter


class NoSharedMemory(Exception):
    """Ranks cannot map each other's memory; raised on all of them."""


class Shared:
    """Exchanges between the ranks of a communicator that lies within one node; the same methods as `transfer.Direct`.

    Parameters
    ----------
    MPI : module
        mpi4py's, handed in so that this file need not import it.
    comm : mpi4py.MPI.Intracomm
    wait : callable
        `wait(test)` returns once `test()` is true.

    Raises
    ------
    NoSharedMemory
        On all ranks.
    """

    def __init__(self, MPI, comm, wait):
        self._MPI, self._comm, self._wait = MPI, comm, wait
        self._arrays = {}  # address of an array -> that of each rank
        self._met = 0
        counters = [array.view(np.int64) for array in self._map(8)[0]]
        self._counter = counters.pop(comm.rank)
        self._counters = counters

    def allocate(self, count):
        """Zeros, float32 (count,), of this rank; collective, with the same count on all ranks."""
        everyone, mapping = self._map(4 * max(count, 1))
        arrays = [array.view(np.float32)[:count] for array in everyone]
        address = arrays[self._comm.rank].ctypes.data
        self._arrays[address] = arrays[: self._comm.rank] + [None] + arrays[self._comm.rank + 1 :]
        # The others' arrays are unmapped with one's own, which nobody holds here.
        weakref.finalize(mapping, self._arrays.pop, address, None)
        return arrays[self._comm.rank]

    def takes(self, parts):
        """Whether all buffers come from `allocate`, as a whole."""
        return all(buffer.ctypes.data in self._arrays for buffer, _ in parts)

    def reduce(self, parts):
        """Each rank's own span of each buffer becomes the sum over ranks; the rest is undefined."""
        self.meet()
        for buffer, spans in parts:
            self.add(buffer, spans[self._comm.rank])
        self.meet()

    def gather(self, parts):
        """Each rank's span of each buffer goes to all others, in place."""
        self.meet()
        for buffer, spans in parts:
            for peer in self.peers():
                self.copy(buffer, spans[peer], peer)
        self.meet()

    def add(self, buffer, span):
        """A span becomes the sum of all ranks' arrays there; between two `meet`, where nobody else looks."""
        arrays = [buffer if array is None else array.view(buffer.dtype) for array in self._arrays[buffer.ctypes.data]]
        add_arrays([array[slice(*span)] for array in arrays], buffer[slice(*span)])

    def copy(self, buffer, span, peer):
        """Copy a span from another rank's array; between two `meet`."""
        buffer[slice(*span)] = self._arrays[buffer.ctypes.data][peer].view(buffer.dtype)[slice(*span)]

    def peers(self):
        """The others, nearest first: so that not all ranks begin with the same one."""
        return [(self._comm.rank + distance) % self._comm.size for distance in range(1, self._comm.size)]

    def meet(self):
        """Wait until all ranks are here."""
        from pcldnn._kernels import cpu  # not at the top: see `guard_imports`

        self._met += 1
        cpu.fence()
        self._counter[0] = self._met
        self._wait(lambda: all(counter[0] >= self._met for counter in self._counters))
        cpu.fence()

    def _map(self, size):
        """Make `size` bytes of memory of this rank and map that of all: uint8 arrays by rank, and the own mapping."""
        comm, token, problem, handle = self._comm, int.from_bytes(os.urandom(7), "little"), "", -1
        own = None
        try:
            handle = os.memfd_create("pcldnn", os.MFD_CLOEXEC)
            os.ftruncate(handle, _HEADER + size)
            own = _array(handle, size)
            own[1][:8].view(np.int64)[0] = token
        except (OSError, ValueError, AttributeError) as error:
            problem = f"{error!r}"
        places = np.zeros((comm.size, 3), np.int64)
        places[comm.rank] = os.getpid(), handle, token
        self._sum(places)
        everyone = []
        for rank, (process, number, expected) in enumerate(places.tolist()):
            try:
                everyone.append(own if rank == comm.rank else _open(process, number, size, expected))
            except (OSError, ValueError) as error:
                problem = problem or f"memory of rank {rank}: {error}"
                break
        # Also the moment from which on all have mapped all, and the handle can go.
        failed = self._sum(np.array([bool(problem)], np.int64))[0]
        if handle >= 0:
            os.close(handle)
        if failed:
            raise NoSharedMemory(problem or "another rank could not map this one's memory")
        return [data for data, _, _ in everyone], own[2]

    def _sum(self, array):
        self._wait(self._comm.Iallreduce(self._MPI.IN_PLACE, array).Test)
        return array


def _array(handle, size):
    """A file of memory: its data, its header, and the mapping that both keep alive."""
    mapping = mmap.mmap(handle, _HEADER + size)
    memory = np.frombuffer(mapping, np.uint8)
    return memory[_HEADER:], memory[:_HEADER], mapping


def _open(process, number, size, token):
    handle = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    try:
        found = _array(handle, size)
    finally:
        os.close(handle)
    if found[1][:8].view(np.int64)[0] != token:  # the same number of a process in another container
        raise ValueError(f"process {process} is another one")
    return found
