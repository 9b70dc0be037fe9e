"""Pooling of every target against the float64 twin."""

from functools import lru_cache

import numpy as np
import pytest
from blocked import block, padding_lanes, unblock
from cases import POOLINGS, Pooling
from test_kernels_conv import EPS, THREADS, normal

from pcldnn._kernels import reference
from pcldnn.layout import aligned_zeros


def logical_arrays(case):
    """x with many equal values, dy."""
    x = normal((case.n, case.channels, *case.size), 0).round(1)
    return x, normal((case.n, case.channels, *case.output), 1)


def run(kernels, case, arrays, b, put=np.array, out=None, threads=1):
    """Forward and input gradient of maximum, average, average with padding, blocked."""
    x, dy = (put(block(array, b)) for array in arrays)
    out = out or (lambda *shape: np.full(shape, np.nan, x.dtype))
    window, results = (case.kernel, case.stride, case.padding), []
    for average, *include in ((False,), (True, False), (True, True)):
        y, dx = out(*dy.shape), out(*x.shape)
        if average:
            kernels.avg_pool2d_forward(x, y, *window, *include, num_threads=threads)
            kernels.avg_pool2d_input_grad(dy, dx, *window, *include, num_threads=threads)
        else:
            kernels.max_pool2d_forward(x, y, *window, num_threads=threads)
            kernels.max_pool2d_input_grad(x, dy, dx, *window, num_threads=threads)
        results += [y, dx]
    return results


@lru_cache(maxsize=2)
def oracle(case):
    """Results of the twin in float64, logical."""
    return [unblock(r, case.channels) for r in run(reference, case, [a.astype(float) for a in logical_arrays(case)], 8)]


@pytest.mark.parametrize("case", POOLINGS, ids=lambda case: case.name)
def test_pooling(target, case, arena):
    """Maxima are exact; averages and gradients add up to as many terms as a pixel has windows, or a window pixels."""
    got = run(target, case, logical_arrays(case), target.SIMD_WIDTH, arena.put, arena.out, 2)
    limit = EPS * 4 * (case.kernel[0] * case.kernel[1] + 2)
    for result, want in zip(got, oracle(case), strict=True):
        assert not padding_lanes(result, case.channels).any()
        np.testing.assert_allclose(unblock(result, case.channels), want, rtol=0, atol=limit)
    np.testing.assert_array_equal(unblock(got[0], case.channels), oracle(case)[0].astype(np.float32))


@pytest.mark.parametrize("case", POOLINGS, ids=lambda case: case.name)
def test_gradient_through_the_relu_before(target, case):
    """Bit for bit the gradient of the maximum, masked afterwards; windows of zeros alone pass nothing on."""
    x, dy = (block(array, target.SIMD_WIDTH) for array in logical_arrays(case))
    x = np.maximum(x - np.float32(0.5), 0)
    window, apart, together = (case.kernel, case.stride, case.padding), np.empty_like(x), np.empty_like(x)
    target.max_pool2d_input_grad(x, dy, apart, *window)
    sums = np.full((*x.shape[:2], x.shape[4]), np.nan)
    target.max_pool2d_input_grad(x, dy, together, *window, relu=True, sums=sums)
    np.testing.assert_array_equal(together, np.where(x > 0, apart, 0))
    limit = 16 * np.finfo(np.float32).eps * np.abs(dy.astype(np.float64)).sum((2, 3))
    assert (np.abs(sums - together.sum((2, 3), dtype=np.float64)) <= limit).all()


@pytest.mark.parametrize("case", POOLINGS, ids=lambda case: case.name)
def test_threads_do_not_change_a_bit(target, case):
    results = [run(target, case, logical_arrays(case), target.SIMD_WIDTH, threads=t) for t in THREADS]
    for other in results[1:]:
        assert [a.tobytes() for a in results[0]] == [a.tobytes() for a in other]


@pytest.mark.parametrize("kernel", [2, 3])
def test_large_gradients_are_those_of_their_halves(target, kernel):
    """Arrays so large that they are written past the caches get the same bits as halves, which are not; so do sums."""
    if target is reference:
        pytest.skip("the twin writes as NumPy does")
    b, size, outputs = target.SIMD_WIDTH, 61, 30
    blocks = 2 + 2**22 // (2 * size * size * b)
    x, dy = normal((2, blocks, size, size, b), 0), normal((2, blocks, outputs, outputs, b), 1)
    dx, half = aligned_zeros(x.shape), aligned_zeros((1, *x.shape[1:]))
    sums, half_sums = np.empty((2, blocks, b)), np.empty((1, blocks, b))
    window = ((kernel, kernel), (2, 2), (0, 0))
    target.max_pool2d_input_grad(x, dy, dx, *window, relu=True, num_threads=2, sums=sums)
    for part in (slice(0, 1), slice(1, 2)):
        target.max_pool2d_input_grad(x[part], dy[part], half, *window, relu=True, sums=half_sums)
        assert np.array_equal(dx[part], half) and np.array_equal(sums[part], half_sums)
    target.avg_pool2d_input_grad(dy, dx, *window, True, num_threads=2)
    for part in (slice(0, 1), slice(1, 2)):
        target.avg_pool2d_input_grad(dy[part], half, *window, True)
        assert np.array_equal(dx[part], half)


def test_a9_floor_and_ceil(target):
    """BVLC/caffe#1318: 112 x 112, window 3, stride 2: 55 (floor) or 56 (ceil), whose last window is clipped."""
    sizes = {}
    for ceil in (False, True):
        case = Pooling("a9", 1, 2, (112, 112), (3, 3), (2, 2), ceil=ceil)
        x = np.arange(2 * 112 * 112, dtype=np.float32).reshape(1, 2, 112, 112)  # the maximum is the last pixel
        dy = np.ones((1, 2, *case.output), np.float32)
        y, dx, mean = (unblock(r, 2) for r in run(target, case, (x, dy), target.SIMD_WIDTH)[:3])
        sizes[ceil] = y.shape[2:]
        if ceil:
            np.testing.assert_array_equal(y[..., -1, -1], x[..., -1, -1])
            np.testing.assert_array_equal(mean[..., -1, -1], x[..., 110:, 110:].mean((2, 3)))
            assert (dx[..., 111, 111] == 1).all() and (dx[..., 111, :111:2] == [0] + [1] * 55).all()
        else:
            np.testing.assert_array_equal(dx[..., 111], 0)
            np.testing.assert_array_equal(dx[..., 111, :], 0)
        assert dx.sum() == dy.sum()
    assert sizes == {False: (55, 55), True: (56, 56)}


def test_first_of_equal_maxima_gets_the_gradient(target):
    """In row-major order of the window; -0 and 0 are equal, and so are all values of an image of -inf."""
    case = Pooling("ties", 1, 1, (4, 4), (2, 2), (2, 2))
    for fill in (1.0, 0.0, -np.inf):
        x = np.full((1, 1, 4, 4), fill, np.float32)
        if fill == 0.0:
            x[0, 0, ::2, ::2] = -0.0
        dy = np.arange(1, 5, dtype=np.float32).reshape(1, 1, 2, 2)
        dx = unblock(run(target, case, (x, dy), target.SIMD_WIDTH)[1], 1)[0, 0]
        want = np.zeros((4, 4))
        want[::2, ::2] = dy[0, 0]
        np.testing.assert_array_equal(dx, want)


@pytest.mark.parametrize("kernel", [(2, 2), (3, 3), (4, 3)], ids=str)
def test_nan_and_infinity(target, kernel):
    """NaN wins, wherever in the window it stands, and takes the gradient."""
    case = Pooling("nan", 1, 3, kernel, kernel, kernel)
    for place in np.ndindex(kernel):
        x = normal((1, 3, *kernel), 0)
        x[0, 1][place], x[0, 2][place] = np.nan, np.inf
        y, dx = (
            unblock(r, 3)[0] for r in run(target, case, (x, np.ones((1, 3, 1, 1), np.float32)), target.SIMD_WIDTH)[:2]
        )
        assert np.isfinite(y[0]) and np.isnan(y[1]) and y[2] == np.inf
        assert dx[1][place] == dx[2][place] == 1 and dx.sum() == 3


def test_shapes_are_checked(target):
    b = target.SIMD_WIDTH
    x, y = np.zeros((2, 3, 8, 9, b), np.float32), np.zeros((2, 3, 4, 4, b), np.float32)
    window = ((2, 2), (2, 2), (0, 0))
    calls = {
        "max_pool2d_forward": lambda x, y, *more, **named: target.max_pool2d_forward(x, y, *more, **named),
        "max_pool2d_input_grad": lambda x, y, *more, **named: target.max_pool2d_input_grad(
            x, y, x.copy(), *more, **named
        ),
        "avg_pool2d_forward": lambda x, y, *more, **named: target.avg_pool2d_forward(x, y, *more, True, **named),
        "avg_pool2d_input_grad": lambda x, y, *more, **named: target.avg_pool2d_input_grad(y, x, *more, True, **named),
    }
    for call in calls.values():
        call(x, y, *window)
        call(x, np.zeros((2, 3, 4, 5, b), np.float32), *window)  # the ceil rule
        for wrong in (y[:1], y[:, :2], y[:, :, :3], y[:, :, :, :3], np.zeros((2, 3, 5, 5, b), np.float32)):
            with pytest.raises(ValueError, match="y has"):
                call(x, np.ascontiguousarray(wrong), *window)
        with pytest.raises(ValueError, match="wanted at least 1"):
            call(x[:, :, :, :0].copy(), y[:, :, :, :1].copy(), (2, 2), (2, 2), (0, 1))
        for wrong, message in (
            (((0, 2), (2, 2), (0, 0)), "kernel"),
            (((2, 2), (2, 0), (0, 0)), "stride"),
            (((2, 2), (2, 2), (0, -1)), "padding"),
            (((2, 2), (2, 2), (2, 0)), "half"),
            ((2, (2, 2), (0, 0)), "kernel"),
        ):
            with pytest.raises(ValueError, match=message):
                call(x, y, *wrong)
        with pytest.raises(ValueError, match="num_threads"):
            call(x, y, *window, num_threads=0)
    with pytest.raises(ValueError, match="dx"):
        target.max_pool2d_input_grad(x, y, x[:1].copy(), *window)
    if target is not reference:
        with pytest.raises(ValueError, match="x has blocks"):
            target.max_pool2d_forward(
                np.zeros((1, 1, 2, 2, b + 1), np.float32), np.zeros((1, 1, 1, 1, b + 1), np.float32), *window
            )
