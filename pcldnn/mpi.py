"""The MPI behind mpi4py: loaded only when it is used, and what it says of itself.

The only file that imports mpi4py; others get its module MPI from `load`, or handed in.
"""

from . import launcher


class NoMPIError(RuntimeError):
    """MPI was asked for and is not there."""


def load():
    """mpi4py's MPI module, started; NoMPIError where there is none."""
    try:
        from mpi4py import MPI
    except ModuleNotFoundError as error:
        raise NoMPIError(f"mpi4py is not installed: {launcher.INSTALL_ADVICE}") from error
    except (ImportError, RuntimeError) as error:  # mpi4py is there, a library for it is not
        reason = str(error).splitlines()[0]
        message = f"mpi4py is installed, but MPI cannot be loaded ({reason}): {launcher.INSTALL_ADVICE}"
        raise NoMPIError(message) from error
    if not MPI.Is_initialized():
        raise NoMPIError("MPI is not started (mpi4py.rc.initialize = False): call MPI.Init_thread() first")
    return MPI


def library(MPI):
    """`MPICH 5.0.2`, `Open MPI 5.0.11`, ..."""
    line = MPI.Get_library_version().strip().splitlines()[0].split(",")[0]
    return " ".join(line.replace("Version:", "").replace("Open MPI v", "Open MPI ").split())


def thread_level(MPI):
    """`single`, `funneled`, `serialized` or `multiple`: what threads may do together."""
    names = {
        MPI.THREAD_SINGLE: "single",
        MPI.THREAD_FUNNELED: "funneled",
        MPI.THREAD_SERIALIZED: "serialized",
        MPI.THREAD_MULTIPLE: "multiple",
    }
    return names[MPI.Query_thread()]


def mpi_information():
    """What `pcldnn info` says of MPI: a dict of `library`, `mpi4py`, `thread_level`, `advice`; starts MPI."""
    try:
        MPI = load()
    except NoMPIError as error:
        return {"library": "none", "mpi4py": "none", "thread_level": "none", "advice": str(error)}
    import mpi4py

    advice = launcher.mismatch(library(MPI)) if MPI.COMM_WORLD.size == 1 else None
    return {
        "library": library(MPI),
        "mpi4py": mpi4py.__version__,
        "thread_level": thread_level(MPI),
        "advice": advice or "",
    }
