"""Two emulated hosts: where that is possible, an exchange goes over the wire, and nothing is left behind."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest
from mpi_launch import REPOSITORY, mpirun_command

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


@pytest.mark.parametrize(("program", "code"), [("short_run.py", 0), ("no_such_file.py", 2)])
def test_an_exchange_goes_over_the_wire(program, code):
    if emulated_cluster.missing():
        pytest.skip(emulated_cluster.missing())
    if "--oversubscribe" in mpirun_command():
        pytest.skip("for MPICH")
    trial = f"pcldnntry{os.getpid()}"
    if run("ip", "netns", "add", trial).returncode != 0:
        pytest.skip("network namespaces are not allowed here")
    run("ip", "netns", "del", trial)
    command = [sys.executable, str(SCRIPT), "--timeout", "60", sys.executable, str(REPOSITORY / "tests" / "mpi" / program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        output, _ = process.communicate(timeout=120)
    assert (process.returncode == 0) == (code == 0), output
    sent = [float(number) for number in re.findall(r"([\d.]+) MB from rank", output)]
    assert len(sent) == 2
    if code == 0:
        assert all(number > 0.003 for number in sent)  # 1000 floats, half of them each way, twice, and headers
    assert not [name for name in namespaces() if name.startswith(f"pcldnn{process.pid}")]
