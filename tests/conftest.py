"""Fixtures of all tests.  `run_mpi` runs a program under mpirun and never hangs."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from blocked import Arena

import pcldnn
from pcldnn import _kernels, machine

REPOSITORY = Path(__file__).resolve().parent.parent


class MPIRun(NamedTuple):
    """What a program under mpirun did."""

    stdout: str
    stderr: str
    returncode: int
    seconds: float  # [s]

    @property
    def output(self):
        """Everything it said, for the message of an assertion."""
        end = f"exit code {self.returncode} after {self.seconds:.1f} s"
        return f"{end}\n--- stdout\n{self.stdout}--- stderr\n{self.stderr}"


@pytest.fixture(scope="session")
def run_mpi():
    """`run_mpi(ranks, script_or_args, timeout=180, env=None, check=True)` -> MPIRun.

    Runs a Python file (a path relative to the repository, or a list of it and its arguments) on `ranks`
    ranks, under the mpirun that belongs to this Python's mpi4py.  After `timeout` seconds [s] every process
    of the job prints where it is, is killed, and the test fails.  With `check` a non-zero exit code fails
    the test.  Skips where there is no MPI.
    """
    mpirun_command()
    return _run_mpi


def _run_mpi(ranks, script_or_args, timeout=180, env=None, check=True):
    arguments = [script_or_args] if isinstance(script_or_args, str | os.PathLike) else list(script_or_args)
    arguments[0] = REPOSITORY / arguments[0]
    command = [*mpirun_command(), "-n", str(ranks), sys.executable, *map(str, arguments)]
    mark = f"PCLDNN_TEST_RUN={uuid.uuid4().hex}"  # by which all processes of the job are found again
    environment = {**os.environ, **(env or {}), **dict([mark.split("=")]), "PYTHONFAULTHANDLER": "1"}
    # The ranks test the same pcldnn as this process, installed or in place.
    package = str(Path(pcldnn.__file__).parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    # Files, not pipes: a process that outlives its job would keep a pipe open.
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        start = time.monotonic()
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
            start_new_session=True,
        )
        in_time = True
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            in_time = False
        finally:
            seconds = time.monotonic() - start
            _end(process, mark, dump=not in_time)
        for file in (stdout, stderr):
            file.seek(0)
        result = MPIRun(stdout.read(), stderr.read(), process.returncode, seconds)
    said = f"{' '.join(command)}\n{result.output}"
    if not in_time:
        pytest.fail(f"hung: killed after {timeout} s: {said}", pytrace=False)
    if check and result.returncode != 0:
        pytest.fail(f"failed: {said}", pytrace=False)
    return result


@cache
def mpirun_command():
    """The mpirun that fits this Python's mpi4py, with its options; skips the test where there is none."""
    question = (
        "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI\n"
        "print(MPI.Get_library_version())"
    )
    answer = subprocess.run([sys.executable, "-c", question], capture_output=True, timeout=60, check=False)
    if answer.returncode != 0:
        pytest.skip("no MPI: pip install 'pcldnn[mpich]'")
    beside = Path(sys.executable).parent / "mpirun"
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("mpi4py is here, but no mpirun, neither beside this Python nor on PATH")
    if b"Open MPI" in answer.stdout:
        as_root = ["--allow-run-as-root"] if os.getuid() == 0 else []
        return [mpirun, "--oversubscribe", "--bind-to", "none", *as_root]
    return [mpirun]


def _end(process, mark, dump):
    """Kill what is left of a job; with `dump` each Python says first where it was (PYTHONFAULTHANDLER)."""
    if dump:
        for pid in _marked(mark):
            if pid != process.pid and "python" in _text(f"/proc/{pid}/cmdline").split("\0")[0]:
                _kill(pid, signal.SIGABRT)
        time.sleep(0.5)
    for pid in _marked(mark):
        _kill(pid, signal.SIGKILL)
    process.wait()


def _marked(mark):
    """Processes with `mark` in their environment; process groups would not do."""
    pids = map(int, filter(str.isdigit, os.listdir("/proc")))
    return [pid for pid in pids if mark in _text(f"/proc/{pid}/environ")]


def _text(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _kill(pid, number):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


@contextlib.contextmanager
def running_on(name):
    """As if PCLDNN_ISA had asked for a target; gives its module."""
    module = _kernels.targets[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_kernels, "_target", module)
        patch.setattr(_kernels, "TARGET", name)
        patch.setattr(_kernels, "SIMD_WIDTH", module.SIMD_WIDTH)
        machine._detect.cache_clear()
        yield module
    machine._detect.cache_clear()


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
