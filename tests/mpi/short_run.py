"""A job that does one exchange and ends; run many times in a row by test_faults."""

import numpy as np

from pcldnn import communicator

with communicator.create() as comm, comm.abort_on_error():
    buffer = np.ones(1000, np.float32)
    shares = [1000 // comm.size + (rank < 1000 % comm.size) for rank in range(comm.size)]
    comm.reduce_scatter(buffer, shares)
    comm.allgather(buffer, shares)
    assert (buffer == comm.size).all()
