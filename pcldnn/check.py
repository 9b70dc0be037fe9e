"""Check of one convolution shape: every pass and algorithm against float64, and its speed against the machine's.

What `python -m pcldnn check` prints, for bug reports. Layers are planned and run as in a network. The right answer is
computed here, in NumPy and float64 and in logical order, by code that shares nothing with the kernels and their twins.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import numpy as np

from pcldnn.layers import Conv2d
from pcldnn.layers.base import PASSES, LayerPlan, Memory, Unit
from pcldnn.layout import Layout, block, unblock
from pcldnn.machine import Machine, measure_bandwidth, measure_flops
from pcldnn.plan import input_layout
from pcldnn.plan_table import format_blocking
from pcldnn.text import align

# Largest error that passes, as a share of the largest output. Direct sums may be of any length: with 1.6 million terms,
# as of a weight gradient, they are off by 2e-5 when added one after the other (docs/numerics.md).
BOUND = 5e-5
FLOAT64_FLOP = 4e9  # that a pass may cost in float64: larger ones are checked on a sample of their outputs
BUSY = 0.9  # share of the peak that the register tile reaches on cores of its own, and more
SECONDS = 0.3  # of timing a pass, or three calls


@dataclass(frozen=True)
class Result:
    """One pass by one algorithm."""

    pass_name: str
    algorithm: str
    chosen: bool  # whether it is what a network would use
    blocking: object
    error: float  # largest one as a share of the largest output
    checked: float  # share of the outputs that were compared
    seconds: float  # median of the calls
    flop: int  # of direct convolution, whatever the algorithm
    bytes: int  # every array once

    @property
    def failed(self) -> bool:
        return not self.error <= BOUND  # also NaN fails


@dataclass(frozen=True)
class Report:
    """All passes of one shape. Rates are of all threads, measured beside the passes."""

    layer: LayerPlan
    results: tuple[Result, ...]
    peak: float  # [flop/s]
    tile: float  # that of the register tile on operands in L1 [flop/s]
    bandwidth: float  # [byte/s]

    @property
    def failures(self) -> list[Result]:
        return [result for result in self.results if result.failed]

    def __str__(self) -> str:
        return _table(self)


def check(images: int, layer: Conv2d, size: tuple[int, int], threads: int = 1, seed: int = 0) -> Report:
    """Run all passes of a convolution of `images` images of `size` (height, width) by each algorithm that can.

    Inputs and output gradients are normal numbers, filters normal with variance 1 / (C R S).

    Raises
    ------
    ValueError
        When there is no such convolution.
    """
    machine, shape = Machine.detect(), (layer.in_channels, *size)
    padded = Layout(shape, machine.width)
    first = input_layout((("", layer),), shape, machine.width)  # few channels: not padded, but without input gradient
    plans = {
        (name, way): layer.plan(padded if name == "input_grad" else first, images, machine, threads, algorithm=way)
        for name in PASSES
        for way in (None, "direct", "winograd")
    }
    random = np.random.default_rng(seed)
    output = plans["forward", None].output
    x = random.standard_normal((images, *shape), np.float32)
    weight = random.standard_normal((layer.out_channels, layer.in_channels, *layer.kernel_size), np.float32)
    weight *= (layer.in_channels * layer.kernel_size[0] * layer.kernel_size[1]) ** -0.5
    dy = random.standard_normal((images, *output.logical_shape), np.float32)
    peak, results = measure_flops(threads), []
    for name in PASSES:
        right = _Right(name, layer, x, weight, dy)
        for algorithm in ("direct", "winograd"):
            plan, auto = plans[name, algorithm], getattr(plans[name, None], name)
            if getattr(plan, name).algorithm == algorithm:
                results.append(_result(plan, name, auto.algorithm == algorithm, (x, weight, dy), right, threads))
    peak = max(peak, measure_flops(threads))
    tile = measure_flops(threads, kind="tile_loop")
    return Report(plans["forward", None], tuple(results), peak, tile, measure_bandwidth(threads))


def _result(plan: LayerPlan, name: str, chosen: bool, arrays, right: _Right, threads: int) -> Result:
    """Run a pass once to be compared, then again to be timed."""
    x, weight, dy = arrays
    made = getattr(plan, name)
    memory = Memory.alone(plan, len(x))
    for array in (memory.output, memory.input_grad, memory.gradients, memory.scratch[name]):
        array.fill(np.nan)  # what is not written cannot pass
    plan.to_flat({"weight": weight}, memory.parameters)
    blocked = block(x, plan.input, num_threads=threads), block(dy, plan.output, num_threads=threads)
    call = Unit(plan, memory, threads).call(name, *blocked)
    got = {
        "forward": lambda: unblock(memory.output, plan.output),
        "weight_grad": lambda: plan.from_flat(memory.gradients)["weight"],
        "input_grad": lambda: unblock(memory.input_grad, plan.input),
    }[name]
    call()
    error = right.error(got())
    return Result(
        name, made.algorithm, chosen, made.blocking, error, right.share, _time(call), made.flop, made.bytes
    )  # fmt: skip


def _time(call) -> float:
    """Median time of a call [s]."""
    times = []
    while len(times) < 3 or sum(times) < SECONDS:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median(times)


# --- float64 ----------------------------------------------------------------------------------------------------


class _Right:
    """A sample of the right result of a pass: the outputs `rows` x `columns` of its first two dimensions.

    Those are images and channels; of the weight gradient, output and input channels.
    """

    def __init__(self, name: str, layer: Conv2d, x, weight, dy):
        count = {"forward": dy.shape[:2], "input_grad": x.shape[:2], "weight_grad": weight.shape[:2]}[name]
        flop = 2 * weight.size * len(dy) * dy.shape[2] * dy.shape[3]
        most = max(int(count[0] * count[1] * FLOAT64_FLOP / flop), 1)
        rows = min(count[0], max(2, -(-most // count[1])))
        self.rows, self.columns = _spread(rows, count[0]), _spread(max(most // rows, 1), count[1])
        self.share = len(self.rows) * len(self.columns) / (count[0] * count[1])
        geometry = layer.stride, layer.padding
        if name == "forward":
            self.values = _forward(x[self.rows], weight[self.columns], *geometry, dy.shape[2:])
        elif name == "input_grad":
            self.values = _input_grad(dy[self.rows], weight[:, self.columns], *geometry, x.shape[2:])
        else:
            self.values = _weight_grad(x[:, self.columns], dy[:, self.rows], *geometry, weight.shape[2:])

    def error(self, got: np.ndarray) -> float:
        """Largest error as a share of the largest right value."""
        error = np.abs(got[np.ix_(self.rows, self.columns)] - self.values).max()
        largest = np.abs(self.values).max()
        return float(error / largest if largest else error)


def _spread(count: int, total: int) -> np.ndarray:
    """At most `count` of the numbers 0..total-1, the first and the last among them."""
    return np.unique(np.linspace(0, total - 1, min(count, total)).astype(int))


def _taps(image: np.ndarray, stride, taps, outputs):
    """For each filter tap (r, s) the view of a framed image (C, H', W') that it meets, one value an output."""
    for r in range(taps[0]):
        for s in range(taps[1]):
            rows = slice(r, r + (outputs[0] - 1) * stride[0] + 1, stride[0])
            yield r, s, image[:, rows, s : s + (outputs[1] - 1) * stride[1] + 1 : stride[1]]


def _framed(image, padding) -> np.ndarray:
    return np.pad(image.astype(np.float64), ((0, 0), *((p, p) for p in padding)))


def _forward(x, weight, stride, padding, outputs) -> np.ndarray:
    y, weight = np.zeros((len(x), len(weight), outputs[0] * outputs[1])), weight.astype(np.float64)
    for image, out in zip(x, y):
        for r, s, view in _taps(_framed(image, padding), stride, weight.shape[2:], outputs):
            out += weight[:, :, r, s] @ view.reshape(len(view), -1)
    return y.reshape(*y.shape[:2], *outputs)


def _input_grad(dy, weight, stride, padding, size) -> np.ndarray:
    dx, weight = np.zeros((len(dy), weight.shape[1], *size)), weight.astype(np.float64)
    for gradient, out in zip(dy.astype(np.float64), dx):
        framed = _framed(out, padding)
        for r, s, view in _taps(framed, stride, weight.shape[2:], gradient.shape[1:]):
            view += (weight[:, :, r, s].T @ gradient.reshape(len(gradient), -1)).reshape(view.shape)
        out[...] = framed[:, padding[0] : padding[0] + size[0], padding[1] : padding[1] + size[1]]
    return dx


def _weight_grad(x, dy, stride, padding, taps) -> np.ndarray:
    dweight = np.zeros((dy.shape[1], x.shape[1], *taps))
    for image, gradient in zip(x, dy.astype(np.float64)):
        for r, s, view in _taps(_framed(image, padding), stride, taps, gradient.shape[1:]):
            dweight[:, :, r, s] += gradient.reshape(len(gradient), -1) @ view.reshape(len(view), -1).T
    return dweight


# --- the table --------------------------------------------------------------------------------------------------


def _table(report: Report) -> str:
    layer, results = report.layer, report.results
    rows = [("pass", "by", "blocking", "error", "checked", "ms", "Gflop/s", "of peak", "of roofline")]
    for result in results:
        rate = result.flop / result.seconds
        roofline = min(report.peak, report.bandwidth * result.flop / result.bytes)
        rows.append((
            result.pass_name, result.algorithm + " *" * result.chosen, format_blocking(result.blocking),
            f"{result.error:.1e}" + " !" * result.failed, f"{100 * result.checked:.3g} %",
            f"{1e3 * result.seconds:,.3f}", f"{rate / 1e9:,.1f}",
            f"{100 * rate / report.peak:.1f} %", f"{100 * rate / roofline:.1f} %",
        ))  # fmt: skip
    shapes = [f"{layer.images}x{'x'.join(map(str, shape.logical_shape))}" for shape in (layer.input, layer.output)]
    padding = "x".join(map(str, layer.layer.padding))
    share = report.tile / report.peak
    lines = [
        f"{layer}, padding {padding}: {' to '.join(shapes)}, {results[0].flop / 1e9:.3g} Gflop a pass",
        f"peak {report.peak / 1e9:,.1f} Gflop/s of multiply-adds, memory {report.bandwidth / 1e9:,.1f} GB/s (triad)",
        f"register tile fed from L1: {share:.0%} of the peak"
        + (", so something else uses these cores: expect no more of a kernel" if share < BUSY else ""),
        "",
        *align(rows, 3),
        "",
        "* what a network uses here. Rates count the flop of direct convolution, so Winograd may exceed the peak.",
    ]
    if any(result.checked < 1 for result in results):
        lines.append("Outputs that are checked in float64 are spread evenly over images and channels.")
    if report.failures:
        names = ", ".join(f"{result.pass_name} ({result.algorithm})" for result in report.failures)
        lines.append(f"FAILED: {names}: the largest error exceeds {BOUND:g} of the largest output")
    else:
        lines.append(f"All errors are at most {BOUND:g} of the largest output.")
    return "\n".join(lines)
