"""Which launcher started this process, and does MPI agree with it?  Pure: no MPI is imported here.

A launcher that does not fit the MPI library behind mpi4py starts N processes of which each believes to be
rank 0 of 1. They then train N copies and write the same checkpoint.  MPI itself cannot tell; the
environment can.
"""

import os
import sys
from dataclasses import dataclass

from pcldnn.text import counted

INSTALL_ADVICE = (
    "pip install 'pcldnn[mpich]' brings MPICH and its mpirun as a wheel; to use the MPI of this system, "
    "pip install mpi4py with that MPI's libraries on the loader's path (on a cluster: load its MPI module)"
)


@dataclass(frozen=True)
class Launch:
    """What a launcher says about this process.

    Attributes
    ----------
    launcher : str
        Its name, as its users write it.
    variable : str
        The environment variable that holds the number of tasks, or the task's index where no number is given.
    tasks : int
        Number of tasks; at least `index` + 1.
    index : int
        Index of this task, 0 where unknown.
    """

    launcher: str
    variable: str
    tasks: int
    index: int


# (launcher, variables for the number of tasks, variables for the index).  Launchers that start MPI come
# first: they are the innermost ones (mpirun inside a Slurm job), so what they say counts.
_MPI_LAUNCHERS = (
    ("Open MPI's mpirun", ("OMPI_COMM_WORLD_SIZE",), ("OMPI_COMM_WORLD_RANK",)),
    ("MVAPICH's launcher", ("MV2_COMM_WORLD_SIZE", "MVP_COMM_WORLD_SIZE"),
     ("MV2_COMM_WORLD_RANK", "MVP_COMM_WORLD_RANK")),
    ("a PMI launcher (mpirun of MPICH or Intel MPI, or srun --mpi=pmi2)", ("PMI_SIZE",), ("PMI_RANK",)),
    ("jsrun", ("JSM_NAMESPACE_SIZE",), ("JSM_NAMESPACE_RANK",)),
    ("flux", ("FLUX_JOB_SIZE",), ("FLUX_TASK_RANK",)),
    ("PALS (aprun, mpiexec of Cray)", ("PALS_SIZE",), ("PALS_RANKID",)),
)


def launches(environ=None):
    """What the launchers of this process say, the innermost first.

    Slurm needs care.  `SLURM_NTASKS` describes the allocation and is set in the shell of `salloc` as well,
    where a lone `python` is legitimately one process; there `SLURM_PROCID` is absent, or a step of one task
    is described (`SLURM_STEP_NUM_TASKS=1`).  Under `srun` both describe this task.  In a batch script
    (`sbatch -n 4`) `SLURM_PROCID` is 0 and no step is described: a lone `python` there is one process of an
    allocation of four, in practice a forgotten `srun`; it counts as a mismatch, and whoever means it says
    so.
    """
    environ = os.environ if environ is None else environ
    found = []
    for launcher, sizes, ranks in _MPI_LAUNCHERS:
        index, _ = _first_integer(environ, ranks)
        tasks, variable = _first_integer(environ, sizes)
        if tasks is not None:
            found.append(Launch(launcher, variable, max(tasks, (index or 0) + 1), index or 0))
    if not found:  # PMIx gives an index and no size: an index above 0 is proof of more than one task
        index, variable = _first_integer(environ, ("PMIX_RANK",))
        if index:
            found.append(Launch("a PMIx launcher", variable, index + 1, index))
    index, _ = _first_integer(environ, ("SLURM_PROCID",))
    if index is not None:
        tasks, variable = _first_integer(environ, ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"))
        if tasks is not None or index > 0:
            found.append(Launch("Slurm", variable or "SLURM_PROCID", max(tasks or 1, index + 1), index))
    return found


def mismatch(library=None, environ=None):
    """Explain why a process that MPI calls rank 0 of 1 is in truth one of several; for an MPI size of 1.

    Parameters
    ----------
    library : str, optional
        Name of the MPI library behind mpi4py; None when there is none.
    environ : mapping, optional
        Environment; default is that of the process.

    Returns
    -------
    str or None
        The message, or None when no launcher says more than one task.
    """
    found = launches(environ)
    if not found or found[0].tasks == 1:
        return None
    launch = found[0]
    if library is None:
        why = f"no MPI is available to this Python, so the tasks cannot see each other. {INSTALL_ADVICE}"
    else:
        why = (
            f"{library} (the MPI behind mpi4py here) sees one process: the launcher belongs to another MPI "
            "or offers no process management that this MPI understands. Use the mpirun beside this Python "
            f"({_mpirun_hint()}), or install an mpi4py that uses the launcher's own MPI; under Slurm look at "
            "srun --mpi=list"
        )
    return (
        f"the launcher and MPI disagree: {launch.launcher} started {launch.tasks} tasks "
        f"({launch.variable}, this is task {launch.index}), but this process would train alone and "
        f"{launch.tasks} copies would write the same files: {why}. "
        "If one process on its own is what you want, ask for it: --single-process "
        "(pcldnn.communicator.create(single_process=True))"
    )


def copies_warning(environ=None):
    """The warning of a process that is to train alone although its launcher has several tasks, or None.

    Not an error: a lone process of an allocation, and tasks with flags of their own, are what `--single-process` is
    for.
    """
    found = launches(environ)
    if not found or found[0].tasks == 1:
        return None
    launch = found[0]
    return (
        f"--single-process: this process trains alone, and {launch.launcher} has {launch.tasks} tasks "
        f"({launch.variable}, this is task {launch.index}): if all run this command, each trains a copy and writes the "
        "same files. Leave --single-process out to train together"
    )


def oversubscription_warning(ranks):
    """The warning about the first node that has more threads than cores, or None.

    Parameters
    ----------
    ranks : list of tuple
        For each rank: host name, node, threads, cores that the job may use on the node, cores that this
        rank may use.
    """
    nodes = {}
    for rank, (host, node, threads, cores, own) in enumerate(ranks):
        nodes.setdefault((node, host), []).append((rank, threads, cores, own))
    for (_, host), members in nodes.items():
        total = sum(threads for _, threads, _, _ in members)
        cores = max(1, min(cores for _, _, cores, _ in members))
        if total > cores:
            count = len(members)
            fix = (
                f"use --threads {cores // count}"
                if count <= cores
                else f"start at most {cores} ranks on this node (mpirun -n {cores}) with --threads 1"
            )
            return (
                f"node {host} is oversubscribed: {counted(count, 'rank')} with {counted(total, 'thread')} on "
                f"{counted(cores, 'core')}, which slows all; {fix}"
            )
        for rank, threads, _, own in members:
            if threads > own:
                return (
                    f"rank {rank} on {host} is bound to {own} of the node's {cores} cores but runs {threads} "
                    f"threads; use --threads {own}, or do not bind (Open MPI: mpirun --bind-to none; "
                    "MPICH: no -bind-to; Slurm: srun --cpu-bind=none)"
                )
    return None


def _mpirun_hint():
    beside = os.path.join(os.path.dirname(sys.executable), "mpirun")
    return beside if os.path.exists(beside) else "none is there: pip install 'pcldnn[mpich]' installs one"


def _first_integer(environ, names):
    for name in names:
        try:
            return int(environ[name]), name
        except (KeyError, ValueError):  # Slurm writes '4(x2)' in some variables; none of those is used here
            continue
    return None, None
