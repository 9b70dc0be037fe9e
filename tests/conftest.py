"""Fixtures of all tests."""

import pytest
from blocked import Arena
from mpi_launch import launch, mpirun_command
from on_target import running_on

from pcldnn import _kernels


@pytest.fixture(scope="session")
def run_mpi():
    """`run_mpi(ranks, script_or_args, timeout=180, env=None, check=True)` -> MPIRun.

    Runs a Python file (a path relative to the repository, or a list of it and its arguments) on `ranks`
    ranks, under the mpirun that belongs to this Python's mpi4py.  After `timeout` seconds [s] every process
    of the job prints where it is, is killed, and the test fails.  With `check` a non-zero exit code fails
    the test.  Skips where there is no MPI.
    """
    mpirun_command()
    return launch


@pytest.fixture(params=sorted(_kernels.targets))
def target(request):
    """Run the test on each target that this CPU runs; the target's module."""
    with running_on(request.param) as module:
        yield module


@pytest.fixture
def arena():
    """Arrays between guards (see blocked.Arena); the guards are checked when the test is over."""
    arena = Arena()
    yield arena
    arena.check()
