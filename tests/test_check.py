"""`python -m pcldnn check`: right shapes pass on every target, and what is wrong is found, named and exits with 1."""

import numpy as np
import pytest

from pcldnn import _kernels, check, cli
from pcldnn.layers import Conv2d

AWKWARD = {
    "odd channels": (2, Conv2d(5, 19, 3, padding=1, bias=False), (9, 7)),
    "unpadded input": (1, Conv2d(3, 7, (3, 2), stride=(1, 2), padding=(0, 1), bias=False), (6, 11)),
    "stride beyond the filter": (3, Conv2d(17, 4, 2, stride=3, padding=2, bias=False), (8, 5)),
    "padding beyond the filter": (1, Conv2d(1, 1, 1, padding=3, bias=False), (1, 2)),
}


@pytest.fixture(autouse=True)
def no_measurements(monkeypatch):
    monkeypatch.setattr(check, "SECONDS", 0)
    monkeypatch.setattr(check, "measure_flops", lambda threads, **kind: 1e12)
    monkeypatch.setattr(check, "measure_bandwidth", lambda threads: 1e11)


@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_shapes_are_right(target, name):
    images, layer, size = AWKWARD[name]
    report = check.check(images, layer, size, threads=2)
    assert not report.failures and all(result.checked == 1 for result in report.results), str(report)
    ways = [(result.pass_name, result.algorithm) for result in report.results]
    both = layer.kernel_size == (3, 3) and layer.in_channels > 4
    assert len(set(ways)) == len(ways) == (6 if both else 3)
    assert sum(result.chosen for result in report.results) == 3  # one a pass


def test_the_float64_passes_are_one_operator_and_its_adjoints():
    """<F(x, w), dy> = <x, F*(dy)> = <w, G(x, dy)>: with one pass against windows taken one by one, all are right."""
    random, stride, padding = np.random.default_rng(1), (2, 1), (1, 2)
    x, weight = random.standard_normal((2, 3, 7, 4)), random.standard_normal((5, 3, 3, 2))
    dy = random.standard_normal((2, 5, 4, 7))
    y = check._forward(x, weight, stride, padding, (4, 7))
    framed = np.pad(x, ((0, 0), (0, 0), (1, 1), (2, 2)))
    for p, q in np.ndindex(4, 7):
        window = framed[:, :, 2 * p : 2 * p + 3, q : q + 2]
        np.testing.assert_allclose(y[:, :, p, q], np.einsum("ncrs,kcrs->nk", window, weight), atol=1e-12)
    dx = check._input_grad(dy, weight, stride, padding, (7, 4))
    dweight = check._weight_grad(x, dy, stride, padding, (3, 2))
    assert np.vdot(x, dx) == pytest.approx(np.vdot(y, dy), rel=1e-12)
    assert np.vdot(weight, dweight) == pytest.approx(np.vdot(y, dy), rel=1e-12)


@pytest.mark.parametrize("kernel, output", [("conv2d_forward", 3), ("conv2d_weight_grad", 2), ("conv2d_input_grad", 2)])
def test_one_wrong_output_is_found_in_a_sample(monkeypatch, capsys, kernel, output):
    """The last output of all, when so few are checked that not all images and channels are."""
    right = getattr(_kernels, kernel)

    def wrong(*arguments):
        right(*arguments)
        arguments[output].flat[-1] += 0.01

    monkeypatch.setattr(_kernels._target, kernel, wrong)
    monkeypatch.setattr(check, "FLOAT64_FLOP", 2e5)
    b = _kernels.SIMD_WIDTH
    assert cli.main(["check", "4", str(b), "5", "6", str(b), "3", "3", "--stride", "2x1", "--padding", "1"]) == 1
    out = capsys.readouterr().out
    name = kernel.removeprefix("conv2d_")
    assert f"FAILED: {name} (direct): the largest error exceeds 5e-05" in out and "spread evenly" in out
    assert out.count(" !") == 1


def test_the_screen(capsys):
    assert cli.main(["check", "2", "5", "6", "6", "7", "3", "3", "--padding", "1", "--threads", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 140
    head, shape, rates = lines[:3]
    assert head.startswith("pcldnn ") and _kernels.TARGET in head and "2 threads" in head
    assert shape.startswith("Conv2d 3x3, padding 1x1: 2x5x6x6 to 2x7x6x6") and "1,000.0 Gflop/s" in rates
    assert lines[-1] == "All errors are at most 5e-05 of the largest output."


@pytest.mark.parametrize("arguments, text", [
    ("1 2 3 3 4 5 5", "no output"), ("0 2 3 3 4 1 1", "N: got 0"), ("1 0 3 3 4 1 1", "channels"),
    ("1 2 3 3 4 1 1 --stride 0", "stride"), ("1 2 3 3 4 1 1 --threads 0", "threads"),
])
def test_what_cannot_be_is_one_line(capsys, arguments, text):
    assert cli.main(["check", *arguments.split()]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and text in captured.err and captured.err.count("\n") == 1


def test_a_pair_that_is_none(capsys):
    with pytest.raises(SystemExit):
        cli.main("check 1 2 3 3 4 1 1 --stride 1,1".split())
    assert "wanted one number or two" in capsys.readouterr().err
