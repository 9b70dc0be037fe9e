"""Fixtures of all tests."""

import json

import pytest
from blocked import Arena
from mpi_launch import launch, mpi_library, mpirun_command
from on_target import running_on

from pcldnn import _kernels


def pytest_report_header():
    return f"MPI: {(mpi_library() or 'none').splitlines()[0]}"


def pytest_collection_modifyitems(items):
    for item in items:
        if "run_mpi" in item.fixturenames:
            item.add_marker(pytest.mark.mpi)


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


@pytest.fixture(scope="module")
def run_cases(run_mpi, tmp_path_factory):
    """`run_cases(program, cases, **options)`: ``results(ranks, case)``, what each rank got in a case.

    The program is a file of tests/mpi. All cases of a number of ranks run as one job, when the first of them is asked
    for; `results.folder(ranks)` is where it wrote its files.
    """

    def prepared(program, cases, **options):
        folders = {}

        def results(ranks, case):
            if ranks not in folders:
                folder = tmp_path_factory.mktemp(f"ranks{ranks}")
                run_mpi(ranks, [f"tests/mpi/{program}", folder, *cases], **options)
                folders[ranks] = folder
            return [json.loads((folders[ranks] / f"{case}-{rank}.json").read_text()) for rank in range(ranks)]

        results.folder = folders.get
        return results

    return prepared


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
