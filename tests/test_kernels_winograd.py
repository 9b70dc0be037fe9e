"""Winograd convolution of every target against direct convolution in float64 (`reference`), not against its own twin.

Bound on the largest error: 2e-5 of the largest output, in every pass and for every shape, also when all inputs are
positive with a mean far above their spread (as after ReLU). The twin, which adds up all channels at once, has 5e-5.
"""

import numpy as np
import pytest

from pcldnn._kernels import checks, reference

BOUND, TWIN_BOUND = 2e-5, 5e-5
POINTS = checks.WINOGRAD_POINTS
# images, input channels, height, width, filters, padding
SHAPES = {
    "vgg_a conv2": (1, 64, 9, 112, 128, (1, 1)),
    "vgg_a conv4": (1, 256, 14, 56, 256, (1, 1)),
    "vgg_a conv7": (2, 512, 14, 14, 512, (1, 1)),
    "overfeat_fast conv4": (1, 512, 12, 12, 1024, (1, 1)),
    "7x7": (3, 40, 7, 7, 24, (1, 1)),
    "13x13": (2, 33, 13, 13, 17, (1, 1)),
    "one tile": (1, 8, 6, 6, 8, (1, 1)),
    "5x9": (2, 8, 5, 9, 8, (1, 1)),
    "8x10": (1, 12, 8, 10, 8, (1, 1)),
    "one pixel": (3, 5, 1, 1, 7, (1, 1)),
    "1x2": (2, 9, 1, 2, 3, (1, 1)),
    "one output": (2, 3, 3, 3, 9, (0, 0)),
    "no padding": (2, 17, 10, 11, 16, (0, 0)),
    "full padding": (1, 16, 5, 6, 33, (2, 2)),
    "mixed padding": (1, 4, 9, 7, 5, (0, 2)),
    "padding beyond the filter": (1, 8, 4, 3, 8, (3, 4)),
    "tall": (1, 7, 67, 2, 9, (1, 1)),
    "no images": (0, 8, 6, 6, 8, (1, 1)),
    "5x5, overfeat_fast conv2": (1, 96, 16, 28, 256, (0, 0)),
    "5x5, one tile": (2, 8, 4, 4, 8, (2, 2)),
    "5x5, 13x13": (2, 33, 13, 13, 17, (2, 2)),
    "5x5, rests": (3, 9, 6, 7, 5, (2, 2)),
    "5x5, one output": (2, 3, 5, 5, 9, (0, 0)),
    "5x5, mixed padding": (1, 20, 10, 7, 24, (0, 4)),
    "5x5, 1x2": (2, 5, 1, 2, 3, (2, 2)),
}
DATA = ("normal", "positive", "mean")
BLOCKINGS = [None, (1, 1, 1), (5, 2, 2), (64, 3, 2)]


def size(name):
    """Of the filters."""
    return 5 if name.startswith("5x5,") else 3


def block(x, b):
    """(N, C, H, W) -> (N, CB, H, W, b)."""
    n, c, h, w = x.shape
    padded = np.zeros((n, -(-c // b) * b, h, w), x.dtype)
    padded[:, :c] = x
    return np.ascontiguousarray(padded.reshape(n, -1 if n else padded.shape[1] // b, b, h, w).transpose(0, 1, 3, 4, 2))


def block_filter(weight, b):
    """(K, C, R, S) -> (KB, CB, R, S, b, b)."""
    k, c, r, s = weight.shape
    padded = np.zeros((-(-k // b) * b, -(-c // b) * b, r, s), weight.dtype)
    padded[:k, :c] = weight
    return np.ascontiguousarray(padded.reshape(-1, b, padded.shape[1] // b, b, r, s).transpose(0, 2, 4, 5, 3, 1))


def arrays(name, data="positive"):
    """x, weight, bias, dy in logical order, float32."""
    n, c, h, w, k, padding = SHAPES[name]
    r = size(name)
    random = np.random.default_rng(len(name))
    x = random.standard_normal((n, c, h, w))
    x = {"normal": x, "positive": np.maximum(x, 0), "mean": np.maximum(x + 5, 0)}[data]
    weight = random.standard_normal((k, c, r, r)) * np.sqrt(2 / (r * r * c))
    dy = random.standard_normal((n, k, h + 2 * padding[0] - r + 1, w + 2 * padding[1] - r + 1))
    if data == "mean":
        dy += 3
    return [array.astype(np.float32) for array in (x, weight, random.standard_normal(k), dy)]


def winograd(kernels, values, padding, b, blocking=None, threads=1, relu=True):
    """y, dx, dweight, blocked; every output starts as NaN."""
    x, weight, bias, dy = values
    x, dy, weight = block(x, b), block(dy, b), block_filter(weight, b)
    blocked_bias = np.zeros(weight.shape[0] * b, x.dtype)
    blocked_bias[: len(bias)] = bias
    outputs = [np.full_like(array, np.nan) for array in (dy, x, weight)]
    in_blocks, out_blocks = weight.shape[1], weight.shape[0]
    u = np.full((POINTS, out_blocks, in_blocks * b, b), np.nan, x.dtype)
    transposed = np.full((POINTS, in_blocks, out_blocks * b, b), np.nan, x.dtype)
    kernels.winograd_transform_filter(weight, u, num_threads=threads)
    kernels.winograd_transform_filter(weight, transposed, input_grad=True, num_threads=threads)
    options = {"blocking": blocking, "num_threads": threads, "kernel": weight.shape[2]}
    kernels.winograd_forward(x, u, blocked_bias, outputs[0], padding, relu, **options)
    kernels.winograd_input_grad(dy, transposed, outputs[1], padding, **options)
    del options["kernel"]
    kernels.winograd_weight_grad(x, dy, outputs[2], padding, **options)
    return outputs


def direct(values, padding, b):
    """The same by direct convolution in float64."""
    x, weight, bias, dy = (value.astype(np.float64) for value in values)
    x, dy, weight = block(x, b), block(dy, b), block_filter(weight, b)
    blocked_bias = np.zeros(weight.shape[0] * b)
    blocked_bias[: len(bias)] = bias
    y, dx, dweight = np.empty_like(dy), np.empty_like(x), np.empty_like(weight)
    reference.conv2d_forward(x, weight, blocked_bias, y, (1, 1), padding, relu=True)
    weight_t = np.empty((weight.shape[1], weight.shape[0], *weight.shape[2:]))
    reference.conv2d_transpose_filter(weight, weight_t)
    reference.conv2d_input_grad(dy, weight_t, dx, (1, 1), padding)
    reference.conv2d_weight_grad(x, dy, dweight, (1, 1), padding)
    return y, dx, dweight


def error(got, wanted):
    """Largest error as a share of the largest value."""
    assert np.isfinite(got).all()
    largest = np.abs(wanted).max(initial=0)
    return np.abs(got - wanted).max(initial=0) / largest if largest else np.abs(got).max(initial=0)


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("name", SHAPES)
def test_the_three_passes(target, name, data):
    values, padding, b = arrays(name, data), SHAPES[name][5], target.SIMD_WIDTH
    got, bound = winograd(target, values, padding, b), TWIN_BOUND if target is reference else BOUND
    for pass_name, value, wanted in zip(("y", "dx", "dweight"), got, direct(values, padding, b), strict=True):
        assert error(value, wanted) < bound, pass_name


@pytest.mark.parametrize("name", ["7x7", "13x13", "no padding", "mixed padding", "one pixel", "no images", "5x5, rests"])
@pytest.mark.parametrize("blocking", BLOCKINGS[1:], ids=str)
def test_blocking_changes_nothing_but_the_order_of_sums(target, name, blocking):
    """And of outputs and input gradients only the blocks of summed channels do."""
    values, padding, b = arrays(name), SHAPES[name][5], target.SIMD_WIDTH
    plain = winograd(target, values, padding, b, (10**6, 10**6, blocking[2]))
    got = winograd(target, values, padding, b, blocking)
    assert all(np.array_equal(one, other) for one, other in zip(plain[:2], got[:2], strict=True))
    for one, other in zip(got, winograd(target, values, padding, b), strict=True):
        assert error(one, other.astype(np.float64)) < 1e-5


@pytest.mark.parametrize("blocking", BLOCKINGS, ids=str)
def test_bit_identical_for_any_number_of_threads_and_from_run_to_run(target, blocking):
    values, padding, b = arrays("13x13"), SHAPES["13x13"][5], target.SIMD_WIDTH
    runs = [winograd(target, values, padding, b, blocking, threads) for threads in (1, 1, 2, 3)]
    for run in runs[1:]:
        assert all(np.array_equal(one, other) for one, other in zip(runs[0], run, strict=True))


@pytest.mark.parametrize("blocking", [(0, 1, 1), (5, 1), (5, 1, -2)], ids=str)
def test_blocking_is_checked(target, blocking):
    with pytest.raises(ValueError, match=r"blocking is .*wanted \(tiles, k_blocks, c_blocks\)"):
        winograd(target, arrays("7x7"), SHAPES["7x7"][5], target.SIMD_WIDTH, blocking)


def test_padded_lanes_stay_zero(target):
    values, b = arrays("mixed padding"), target.SIMD_WIDTH
    values[2][...] = 0
    y, dx, dweight = winograd(target, values, (0, 2), b)
    lanes = np.arange(b)
    assert not y[:, -1][..., lanes >= 5 - (y.shape[1] - 1) * b].any()
    assert not dx[:, -1][..., lanes >= 4 - (dx.shape[1] - 1) * b].any()
    assert not dweight[-1, ..., lanes >= 5 - (y.shape[1] - 1) * b].any()


def test_without_bias_and_relu_and_with_nan(target):
    """The sum of the outputs is signed without ReLU, and a NaN is seen through ReLU."""
    values, b = arrays("7x7", "normal"), target.SIMD_WIDTH
    values[2][...] = 0
    y, _, _ = winograd(target, values, (1, 1), b, relu=False)
    rectified, _, _ = winograd(target, values, (1, 1), b)
    assert np.array_equal(np.maximum(y, 0), rectified) and (y < 0).any()
    values[0][1, 3, 2, 2] = np.nan
    x, u = block(values[0], b), np.empty((POINTS, -(-24 // b), -(-40 // b) * b, b), np.float32)
    target.winograd_transform_filter(block_filter(values[1], b), u)
    target.winograd_forward(x, u, None, y, (1, 1), True)
    assert np.isnan(y[1, :, 1:4, 1:4]).all() and np.isfinite(y[[0, 2]]).all()


def test_a_scratch_of_the_stated_size_suffices_and_a_smaller_one_is_refused(target):
    if target is reference:
        pytest.skip("the twins need no scratch")
    values, b = arrays("no padding"), target.SIMD_WIDTH
    x, dy, weight = block(values[0], b), block(values[3], b), block_filter(values[1], b)
    in_blocks, out_blocks = x.shape[1], dy.shape[1]
    u, tiles = np.empty((POINTS, out_blocks, in_blocks * b, b), np.float32), 8
    target.winograd_transform_filter(weight, u)
    blocking = (tiles, out_blocks, 1)
    size = target.winograd_scratch_size(in_blocks, out_blocks, tiles + 3)
    padded = np.full(size + 1, np.float32(7))
    target.winograd_forward(x, u, None, dy, (0, 0), False, padded[:size], blocking, 2)
    assert padded[-1] == 7
    with pytest.raises(ValueError, match="scratch"):
        target.winograd_forward(x, u, None, dy, (0, 0), False, np.empty(99, np.float32), blocking, 2)
    size = u.size + target.winograd_scratch_size(in_blocks, out_blocks, tiles + 3)
    target.winograd_weight_grad(x, dy, weight, (0, 0), np.empty(size, np.float32), blocking, 2)
    with pytest.raises(ValueError, match="scratch"):
        target.winograd_weight_grad(x, dy, weight, (0, 0), np.empty(u.size, np.float32), blocking, 2)


def test_wrong_shapes_are_refused(target):
    values, b = arrays("7x7"), target.SIMD_WIDTH
    x, dy, weight = block(values[0], b), block(values[3], b), block_filter(values[1], b)
    u = np.empty((POINTS, weight.shape[0], weight.shape[1] * b, b), np.float32)
    transposed = np.empty((POINTS, weight.shape[1], weight.shape[0] * b, b), np.float32)
    with pytest.raises(ValueError, match="3x3"):
        target.winograd_transform_filter(np.ascontiguousarray(weight[:, :, :2]), u)
    with pytest.raises(ValueError, match=r"u has shape"):
        target.winograd_transform_filter(weight, u[1:])
    with pytest.raises(ValueError, match=r"y has shape"):
        target.winograd_forward(x, u, None, dy, (0, 0))
    with pytest.raises(ValueError, match=r"y has shape"):
        target.winograd_forward(x, u, None, dy, (1, 1), kernel=5)
    with pytest.raises(ValueError, match=r"filters 4x4, wanted 3x3 or 5x5"):
        target.winograd_forward(x, u, None, dy, (1, 1), kernel=4)
    with pytest.raises(ValueError, match=r"u has shape"):
        target.winograd_forward(x, transposed, None, dy, (1, 1))
    with pytest.raises(ValueError, match=r"bias has shape"):
        target.winograd_forward(x, u, np.zeros(b + 1, np.float32), dy, (1, 1))
    with pytest.raises(ValueError, match=r"dy has shape"):
        target.winograd_input_grad(np.ascontiguousarray(dy[:2]), transposed, x, (1, 1))
    with pytest.raises(ValueError, match=r"dy has shape"):
        target.winograd_weight_grad(x, dy, np.ascontiguousarray(weight[:1]), (1, 1))
    with pytest.raises(ValueError, match="dweight has filters 2x3, wanted 3x3"):
        target.winograd_weight_grad(x, dy, np.ascontiguousarray(weight[:, :, :2]), (1, 1))
    with pytest.raises(ValueError, match="num_threads"):
        target.winograd_forward(x, u, None, dy, (1, 1), num_threads=0)
