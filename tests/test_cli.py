"""``python -m pcldnn``: info and plan."""
import subprocess
import sys
from dataclasses import replace

import pytest

from pcldnn import _kernels, cli
from pcldnn.machine import Machine


@pytest.mark.mpi
def test_info_names_what_a_bug_report_needs(capsys):
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out.replace("SIMD width", "SIMD_width")
    lines = dict(line.split(None, 1) for line in out.splitlines() if not line.startswith(("note", "MPI threads")))
    assert lines["ISA"].split()[0] == _kernels.TARGET
    assert lines["SIMD_width"] == f"{_kernels.SIMD_WIDTH} floats"
    assert "single rank (" in lines["threads"] and int(lines["cores"]) >= 1
    assert {"pcldnn", "targets", "caches", "MPI", "mpi4py"} <= set(lines)


def test_info_refuses_what_training_refuses(capsys, monkeypatch):
    monkeypatch.setenv("PCLDNN_CONV", "fft")
    assert cli.main(["info"]) == 2
    assert capsys.readouterr() == ("", "error: PCLDNN_CONV: got 'fft', wanted one of auto, direct, winograd\n")


def test_info_without_mpi_says_what_to_install():
    code = ("import sys; sys.modules['mpi4py'] = None; from pcldnn.cli import main; sys.exit(main(['info']))")
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout
    assert "pip install" in out and "none" in out


def test_plan_of_the_issue(capsys):
    assert cli.main(["plan", "vgg_a", "--minibatch", "32", "--ranks", "4"]) == 0
    out = capsys.readouterr().out
    for text in ("132,863,336", "features.0 (conv1)", "classifier.6 (fc8)", "+ MaxPool2d 2x2/2", "64x112x112", "memory of a rank", "at most 8 images"):
        assert text in out


@pytest.mark.parametrize("arguments, text", [
    (["vgg_a", "--image-size", "32", "--channels", "1", "--classes", "10"], "28,142,858"),
    (["overfeat_fast", "--ranks", "64", "--minibatch", "256"], "145,"), (["cd_dnn", "--inference"], "inference")])
def test_plans(capsys, arguments, text):
    assert cli.main(["plan", *arguments]) == 0
    assert text in capsys.readouterr().out


def test_plan_with_blocking(capsys, monkeypatch):
    monkeypatch.setattr(Machine, "measured", lambda self: replace(self, cores=4, flops=1e11, memory_bandwidth=2e10))
    assert cli.main(["plan", "cd_dnn", "--blocking", "--threads", "3"]) == 0
    out = capsys.readouterr().out
    assert "memory of a rank" in out and "3 threads, " in out.split("memory of a rank")[1]
    assert "20.0 GB/s over 4 x 100.0 Gflop/s = 0.0500 bytes/flop" in out and "bound by" in out


@pytest.mark.parametrize("arguments, text", [
    (["vgg_a", "--image-size", "16"], "features."), (["vgg_a", "--minibatch", "0"], "minibatch"),
    (["cd_dnn", "--image-size", "16"], "--image-size")])
def test_what_cannot_be_is_one_line(capsys, arguments, text):
    """A6: the layer and the numbers, exit code 2, no traceback."""
    assert cli.main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and text in captured.err and captured.err.count("\n") == 1


def test_as_a_module():
    done = subprocess.run([sys.executable, "-m", "pcldnn", "--version"], check=True, capture_output=True, text=True,
                          timeout=60)
    assert done.stdout.startswith("pcldnn ")
