"""Runs a program under the mpirun that fits this Python's mpi4py, and never hangs."""

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

import pcldnn

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


def launch(ranks, script_or_args, timeout=180, env=None, check=True):
    """What the fixture `run_mpi` of conftest.py gives: see there."""
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
def mpi_library():
    """What the MPI behind this Python's mpi4py says of itself; "" where there is none."""
    question = (
        "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI\n"
        "print(MPI.Get_library_version())"
    )
    answer = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, timeout=60, check=False)
    return answer.stdout if answer.returncode == 0 else ""


@cache
def mpirun_command():
    """The mpirun that fits this Python's mpi4py, with its options; skips the test where there is none."""
    if not mpi_library():
        pytest.skip("no MPI: pip install 'pcldnn[mpich]'")
    beside = Path(sys.executable).parent / "mpirun"
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("mpi4py is here, but no mpirun, neither beside this Python nor on PATH")
    if "Open MPI" in mpi_library():
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
