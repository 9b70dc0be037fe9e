"""A rank that fails in whichever way ends the job in seconds, with one traceback; a job that is done ends."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = "tests/mpi/faults.py"
SECONDS = 20  # [s] from the first failure to the end of the job: about 1, and more on a crowded machine
SHORT_RUNS = int(os.environ.get("PCLDNN_SHORT_RUNS", "5"))  # .ci/run asks for 50


def ends(run_mpi, kind, ranks, size=3, **env):
    """The job ends in time with a non-zero code, and nobody reaches its end."""
    result = run_mpi(size, [PROGRAM, kind, ranks], timeout=90, env=env, check=False)
    assert result.returncode != 0, result.output
    failure = min(map(float, re.findall(r"fails at ([\d.]+)", result.stdout)))
    assert time.monotonic() - failure < SECONDS, result.output
    assert "reached the end" not in result.stdout, result.output
    return result


def one_traceback(result, *texts):
    assert result.stderr.count("Traceback (most recent call last)") == 1, result.output
    assert result.stderr.count("pcldnn: rank ") == 1, result.output
    for text in texts:
        assert text in result.stderr, result.output


def test_one_rank_raises(run_mpi):
    one_traceback(ends(run_mpi, "exception", "1"), "pcldnn: rank 1 of 3", "ValueError: boom on rank 1")


def test_every_rank_but_0_raises(run_mpi):
    """A16."""
    one_traceback(ends(run_mpi, "exception", "1,2,3", size=4), "pcldnn: rank ", "ValueError: boom on rank ")


def test_a_rank_raises_while_the_others_compute(run_mpi):
    one_traceback(ends(run_mpi, "exception", "1", COMPUTE="1"), "pcldnn: rank 1 of 3")


def test_ranks_raise_one_after_the_other(run_mpi):
    one_traceback(ends(run_mpi, "late", "all"), "ValueError: boom on rank")


def test_a_rank_raises_with_an_exchange_under_way(run_mpi):
    """A17, second half."""
    one_traceback(ends(run_mpi, "posted", "1"), "pcldnn: rank 1 of 3")


@pytest.mark.parametrize(("kind", "code"), [("exit_0", 1), ("exit_3", 3)])
def test_one_rank_calls_sys_exit(run_mpi, kind, code):
    result = ends(run_mpi, kind, "1")
    one_traceback(result, "pcldnn: rank 1 of 3", "called sys.exit", "SystemExit")
    assert result.returncode == code


def test_all_ranks_call_sys_exit(run_mpi):
    """Together it is an orderly end: code 0 is success, and one message is printed once."""
    assert "Traceback" not in run_mpi(3, [PROGRAM, "exit_0", "all"]).stderr
    result = ends(run_mpi, "exit_text", "all")
    assert result.stderr.count("stopped for a reason") == 1, result.output
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("kind", ["thread", "thread_exit"])
def test_a_thread_fails(run_mpi, kind):
    one_traceback(ends(run_mpi, kind, "1"), "pcldnn: rank 1 of 3", "thread 'loader-0'")


def test_a_rank_is_interrupted(run_mpi):
    one_traceback(ends(run_mpi, "interrupt", "1"), "pcldnn: rank 1 of 3", "KeyboardInterrupt")


def test_a_rank_is_killed(run_mpi):
    ends(run_mpi, "killed", "1")


def test_an_error_that_all_ranks_raise_is_printed_once(run_mpi):
    result = ends(run_mpi, "collective", "all")
    one_traceback(result, "pcldnn: rank 0 of 3", "all 3 ranks", "NaNLoss: the loss is NaN")


def test_unlike_ranks_are_refused_with_the_difference(run_mpi):
    """A18."""
    one_traceback(ends(run_mpi, "disagree", "all"), "disagree about fc6: ranks 0, 2: 500; rank 1: 501")


def test_a_rank_cannot_import_its_kernels(run_mpi):
    """Before MPI is started."""
    result = run_mpi(3, "tests/mpi/import_error.py", check=False)
    assert result.returncode == 2 and "Traceback" not in result.stderr, result.output
    assert result.stderr.count("error: rank 1 of 3") == result.stderr.count("PCLDNN_ISA=nonsense") == 1, result.output


def test_run_mpi_kills_a_job_that_hangs(run_mpi):
    """The tests' own safety net: the test fails, says where the ranks were, and leaves no process behind."""
    with pytest.raises(pytest.fail.Exception) as failure:
        run_mpi(2, [PROGRAM, "exception", "7"], timeout=8, env={"PCLDNN_HANGING": "1"})
    assert "hung: killed after 8 s" in str(failure.value)
    assert 'faults.py", line' in str(failure.value), failure.value
    assert not [pid for pid in os.listdir("/proc") if b"PCLDNN_HANGING=1" in environment_of(pid)]


def environment_of(pid):
    try:
        return Path("/proc", pid, "environ").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("ranks", [2, 4])
def test_short_runs_always_end(run_mpi, ranks):
    """A17."""
    for _ in range(SHORT_RUNS):
        assert run_mpi(ranks, "tests/mpi/short_run.py", timeout=60).stderr == ""


@pytest.mark.parametrize("interrupts", [True, False])
def test_a_thread_fails_in_a_single_process(interrupts):
    """Without MPI the main thread raises; where Ctrl-C is switched off, the process ends all the same."""
    code = """
import signal, sys, threading, time
sys.modules["mpi4py"] = None
from pcldnn import communicator
def fail(): raise ValueError("boom in the loader")
with communicator.create() as comm, comm.abort_on_error():
    threading.Thread(target=fail, name="loader-0").start()
    time.sleep(60)
"""
    ignore = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    start = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-c", code if interrupts else ignore + code],
        capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert result.returncode == 1
    assert time.monotonic() - start < SECONDS
    assert "ValueError: boom in the loader" in result.stderr
    assert "thread 'loader-0' failed" in result.stderr
