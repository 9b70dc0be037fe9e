"""One rank cannot import pcldnn's kernels; the others go on to start MPI.  For mpirun."""

import os

from pcldnn import launcher
from pcldnn.communicator import create, guard_imports

with guard_imports():
    if launcher.launches()[0].index == 1:
        os.environ["PCLDNN_ISA"] = "nonsense"
    from pcldnn import _kernels

with create() as comm, comm.abort_on_error():
    comm.agree({"SIMD width": _kernels.SIMD_WIDTH})
