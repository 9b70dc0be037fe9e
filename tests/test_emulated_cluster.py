"""Emulated hosts: where that is possible, an exchange goes over the wire, and nothing is left behind."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest
from mpi_launch import REPOSITORY, mpi_library

SCRIPT = REPOSITORY / "scripts" / "emulated_cluster.py"
SPEC = importlib.util.spec_from_file_location("emulated_cluster", SCRIPT)
emulated_cluster = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(emulated_cluster)


def test_it_says_that_it_needs_root(monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert emulated_cluster.main(["true"]) == 2
    assert "root is needed" in capsys.readouterr().err


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def namespaces():
    return {line.split()[0] for line in run("ip", "netns", "list").stdout.splitlines()}


@pytest.fixture
def hosts():
    """`hosts(options, *command, **environment)` -> exit code, MB sent by each host, output; skips where it cannot."""
    if emulated_cluster.missing():
        pytest.skip(emulated_cluster.missing())
    if "MPICH" not in mpi_library():
        pytest.skip("for MPICH")
    trial = f"pcldnntry{os.getpid()}"
    if run("ip", "netns", "add", trial).returncode != 0:
        pytest.skip("network namespaces are not allowed here")
    run("ip", "netns", "del", trial)
    return emulate


def emulate(options, *command, **environment):
    command = [sys.executable, str(SCRIPT), "--timeout", "60", *options, sys.executable, *command]
    environment = {**os.environ, **environment}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as process:
        try:
            output, _ = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.terminate()  # it removes the link; or leaving the block would wait for it without an end
            raise
    assert not [name for name in namespaces() if name.startswith(f"pcldnn{process.pid}")]
    return process.returncode, [float(number) for number in re.findall(r"([\d.]+) MB from host", output)], output


@pytest.mark.parametrize(("program", "works"), [("short_run.py", True), ("no_such_file.py", False)])
def test_an_exchange_goes_over_the_wire(hosts, program, works):
    code, sent, output = hosts([], str(REPOSITORY / "tests" / "mpi" / program))
    assert (code == 0) == works, output
    assert len(sent) == 2
    if works:
        assert all(number > 0.003 for number in sent)  # 1000 floats, half of them each way, twice, and headers


@pytest.mark.parametrize(("count", "shared", "times"), [(2, "1", 1), (2, "0", 2), (3, "1", 1)])
def test_each_byte_crosses_the_wire_once_a_host(hosts, count, shared, times):
    """Two ranks a host: of an array what others own leaves a host once, and what it owns once for each other host.

    By messages between all ranks, each as often as a host has ranks.
    """
    code = """
import numpy as np
from pcldnn import communicator
with communicator.create() as comm, comm.abort_on_error():
    assert (comm.node, comm.nodes) == (comm.rank // 2, comm.size // 2)
    shares = [(3 << 20) // comm.size] * comm.size
    buffer = comm.allocate(sum(shares))
    buffer[:] = comm.rank
    comm.reduce_scatter(buffer, shares)
    comm.allgather(buffer, shares)
    assert (buffer == sum(range(comm.size))).all()
"""
    code, sent, output = hosts(["--hosts", str(count), "--ranks-per-host", "2"], "-c", code, PCLDNN_SHM=shared)
    assert code == 0, output
    assert len(sent) == count
    megabytes = 2 * (12 << 20) * (count - 1) / count / 1e6
    assert all(megabytes * times < number < 1.1 * megabytes * times for number in sent), output
