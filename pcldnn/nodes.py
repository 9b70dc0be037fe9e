"""Which ranks of a communicator share a node, and which share its cores."""

import os

import numpy as np

PRETEND = "PCLDNN_NODES"  # "3+1": the job's first three ranks count as one node, the last as another; for tests


class Nodes:
    """The nodes of a communicator, seen from one rank; collective.

    Parameters
    ----------
    MPI : module
        mpi4py's, handed in so that this file need not import it.
    comm : mpi4py.MPI.Intracomm

    Attributes
    ----------
    comm : mpi4py.MPI.Intracomm
        Of the ranks of this node.
    members : list of list of int
        The ranks of each node, in order; nodes in the order of their first ranks.
    index : int
        This rank's node.
    cores : int
        Cores that the ranks of this node may use together.
    sharing, sharing_index : int
        Ranks of this node that may run on a core on which this one may run, itself included, and how many of them
        come before it.
    """

    def __init__(self, MPI, comm):
        color = pretended_node(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
        shared = MPI.COMM_TYPE_SHARED
        self.comm = comm.Split_type(shared, comm.rank) if color is None else comm.Split(color, comm.rank)
        firsts = np.array(comm.allgather(self.comm.bcast(comm.rank)))
        self.members = [np.flatnonzero(firsts == first).tolist() for first in np.unique(firsts)]
        self.index = next(i for i, ranks in enumerate(self.members) if comm.rank in ranks)
        masks = self.comm.allgather(os.sched_getaffinity(0))
        self.cores = len(set().union(*masks))
        sharing = [not masks[self.comm.rank].isdisjoint(mask) for mask in masks]
        self.sharing, self.sharing_index = sum(sharing), sum(sharing[: self.comm.rank])


def pretended_node(rank, size, environ=os.environ):
    """The node on which a rank of the job is to be taken to run, or None: wherever it does.

    >>> [pretended_node(rank, 4, {"PCLDNN_NODES": "3+1"}) for rank in range(4)]
    [0, 0, 0, 1]

    Raises
    ------
    ValueError
        When the ranks of the nodes are not those of the job.
    """
    text = environ.get(PRETEND)
    if not text:
        return None
    counts = [int(count) if count.isdecimal() else 0 for count in text.split("+")]
    if min(counts) < 1 or sum(counts) != size:
        raise ValueError(
            f"{PRETEND}: got {text!r}, wanted the number of ranks of each node, such as 3+1, {size} in all, the"
            " ranks of this job"
        )
    return int(np.searchsorted(np.cumsum(counts), rank, side="right"))
