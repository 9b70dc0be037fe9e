"""The communicator: exchanges against NumPy, agreement, sub-communicators, launchers, no MPI."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcldnn import communicator, launcher, transfer

RANKS = [1, 2, 3, 4]
# A process to which mpi4py does not exist.
NO_MPI = "import sys; sys.modules['mpi4py'] = None\nfrom pcldnn import communicator\n"


@pytest.mark.parametrize("ranks", RANKS)
def test_exchanges_equal_numpy_and_are_adjoint(run_mpi, ranks):
    result = run_mpi(ranks, "tests/mpi/collectives.py", timeout=120)
    assert f"collectives hold on {ranks} ranks" in result.stdout


@pytest.mark.parametrize("ranks", [2, 3])
def test_agreement_sub_communicators_and_refusals(run_mpi, ranks):
    assert run_mpi(ranks, "tests/mpi/behaviour.py").stdout == "OK\n"


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.integers(1, 60))
def test_segments_cover_every_share_once(shares, limit):
    pieces = list(transfer.segments(shares, limit))
    assert [begin for begin, _, _ in pieces] == list(range(0, sum(shares), limit))
    assert all(end - begin == sum(counts) <= limit for begin, end, counts in pieces)
    assert np.array_equal(np.sum([counts for *_, counts in pieces], axis=0), shares if sum(shares) else 0)
    owner = np.repeat(np.arange(len(shares)), shares)
    for begin, end, counts in pieces:
        assert np.array_equal(owner[begin:end], np.repeat(np.arange(len(shares)), counts))


def test_segments_beyond_the_counts_of_mpi():
    """2^31-1 elements are where MPI's int counts end; three shares of 2^31 each."""
    shares = [2**31] * 3
    pieces = list(transfer.segments(shares, communicator.MAX_COUNT))
    assert pieces[-1][1] == 3 * 2**31
    assert all(sum(counts) <= communicator.MAX_COUNT for *_, counts in pieces)
    assert [sum(counts[rank] for *_, counts in pieces) for rank in range(3)] == shares


def test_serial_communicator_has_the_whole_interface():
    assert public(communicator.Communicator) == public(communicator.SerialCommunicator)
    with communicator.SerialCommunicator() as comm:
        assert (comm.rank, comm.size, comm.node_rank, comm.node_size, comm.nodes) == (0, 1, 0, 1, 1)
        x = np.arange(5, dtype=np.float32)
        comm.reduce_scatter(x, [5])
        comm.allgather(x, [5])
        assert np.array_equal(x, np.arange(5))
        assert comm.allreduce_sum(x) is x
        assert (comm.broadcast(7), comm.gather(7), comm.allgather_object(7)) == (7, [7], [7])
        comm.agree({"a": 1})
        comm.barrier()
        with pytest.raises(ValueError, match="shares"):
            comm.reduce_scatter(x, [4])
        with pytest.raises(KeyError), comm.abort_on_error():
            raise KeyError("as ever")


def public(kind):
    return {name for name in dir(kind) if not name.startswith("_")}


def test_docstrings_hold_the_words_of_the_paper():
    assert "Part-reduce" in communicator.SerialCommunicator.reduce_scatter.__doc__
    assert "Part-broadcast" in communicator.SerialCommunicator.allgather.__doc__


def test_mpi_is_loaded_only_when_used():
    run_python("import sys, pcldnn.communicator; assert not any(m.startswith('mpi4py') for m in sys.modules)")


def test_without_mpi_one_process_works_and_is_told_what_to_install():
    run_python(NO_MPI + "c = communicator.create(); assert c.size == 1 and 'pcldnn[mpich]' in c.note, c.note")
    run_python(NO_MPI + "from pcldnn import mpi; i = mpi.mpi_information(); assert 'pcldnn[mpich]' in i['advice'], i")
    result = run_python(NO_MPI + "communicator.Communicator()", check=False)
    assert "NoMPIError: mpi4py is not installed: pip install 'pcldnn[mpich]'" in result.stderr


@pytest.mark.parametrize("index", [0, 2])
def test_several_tasks_without_mpi_are_refused(index):
    """A20: no four copies that write the same checkpoint."""
    slurm = {"SLURM_NTASKS": "4", "SLURM_PROCID": str(index)}
    result = run_python(NO_MPI + "communicator.create()", slurm, check=False)
    assert result.returncode != 0
    wanted = ("LaunchError", "Slurm started 4 tasks", f"task {index}", "--single-process", "pcldnn[mpich]")
    assert all(text in result.stderr for text in wanted), result.stderr
    run_python(NO_MPI + "assert communicator.create(single_process=True).size == 1", slurm)


def test_the_mpirun_of_another_mpi_is_refused(run_mpi):
    """A20, the everyday form: MPI is there, but the launcher belongs to another one."""
    code = "from pcldnn import communicator; communicator.create()"
    result = run_python(code, {"MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_RANK": "2"}, check=False)
    assert result.returncode != 0
    assert "LaunchError" in result.stderr
    assert "mpirun beside this Python" in result.stderr


@pytest.mark.parametrize(
    ("environ", "tasks"),
    [
        ({}, None),
        ({"PATH": "/bin", "SLURM_JOB_ID": "7"}, None),
        ({"SLURM_NTASKS": "4"}, None),  # the shell of salloc: a lone process is one process
        # its interactive step
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "2"}, 4),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, 4),  # sbatch -n 4 with a forgotten srun
        ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, 2),
        ({"SLURM_PROCID": "3"}, 4),
        ({"SLURM_NTASKS": "4(x2)", "SLURM_PROCID": "0"}, None),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, 2),
        # mpirun -n 1 in a job
        ({"PMI_SIZE": "1", "PMI_RANK": "0", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"}, 3),
        ({"OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": "4"}, None),
        ({"PMIX_RANK": "0"}, None),
        ({"PMIX_RANK": "2"}, 3),
        ({"PMIX_RANK": "0", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, 2),
        ({"MV2_COMM_WORLD_SIZE": "2"}, 2),
        ({"FLUX_JOB_SIZE": "6", "FLUX_TASK_RANK": "5"}, 6),
    ],
)
@pytest.mark.parametrize("library", [None, "MPICH 5.0.2"])
def test_launcher_mismatch(environ, tasks, library):
    message = launcher.mismatch(library, environ)
    if tasks is None:
        assert message is None
    else:
        assert f"started {tasks} tasks" in message
        assert (library or "no MPI") in message


@pytest.mark.parametrize(
    ("ranks", "parts"),
    [
        ([("n1", 0, 1, 2, 2)] * 2, None),
        ([("n1", 0, 2, 2, 2)] * 4, ["n1", "4 ranks with 8 threads on 2 cores", "at most 2 ranks"]),
        ([("n1", 0, 8, 8, 8)] * 2, ["2 ranks with 16 threads on 8 cores", "--threads 4"]),
        ([("n1", 0, 2, 2, 2), ("n2", 1, 3, 2, 2)], ["n2", "1 rank with 3 threads on 2 cores", "--threads 2"]),
        ([("n1", 0, 2, 8, 1), ("n1", 0, 1, 8, 1)], ["rank 0", "bound to 1 of", "--bind-to none"]),
        ([("n1", 0, 4, 4, 4), ("n1", 1, 4, 4, 4)], None),  # two containers of one name are two nodes
    ],
)
def test_oversubscription_names_the_fix(ranks, parts):
    """A23."""
    message = launcher.oversubscription_warning(ranks)
    if parts is None:
        assert message is None
    else:
        assert all(part in message for part in parts), message


def run_python(code, env=None, check=True):
    launched = ("SLURM", "PMI", "OMPI")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(launched)}
    clean["PYTHONPATH"] = os.pathsep.join(sys.path)
    result = subprocess.run(
        [sys.executable, "-c", code], env={**clean, **(env or {})},
        capture_output=True, text=True, timeout=60, check=False,
    )
    assert not check or result.returncode == 0, result.stderr
    return result
