"""Convolution that pools on the way, on every target: its bits are those of the kernels that it joins."""

import numpy as np
import pytest
from blocked import block, block_filter, block_vector, padding_lanes
from cases import AWKWARD_CONVOLUTIONS, NETWORK_CONVOLUTIONS, Convolution
from test_kernels_conv import THREADS, channel_blocks, logical_arrays, normal

from pcldnn._kernels import reference
from pcldnn.layout import aligned_zeros

WINDOW = ((2, 2), (2, 2), (0, 0))
CONVOLUTIONS = [case for case in NETWORK_CONVOLUTIONS + AWKWARD_CONVOLUTIONS if min(case.output) > 1]


def named(cases):
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


def blocked_arrays(case, b, bc):
    """x, weight, bias and the gradient of the pooled output."""
    x, weight, bias, _ = logical_arrays(case)
    dy = normal((case.n, case.filters, case.output[0] // 2, case.output[1] // 2), 4)
    return block(x, bc), block_filter(weight, bc, b), block_vector(bias, b), block(dy, b)


def array(shape, dtype=np.float32):
    return np.empty(shape, dtype)


def together(kernels, case, x, weight, bias, dy, out=array, threads=1):
    """Pooled output, places, the gradient before ReLU and pooling, and its sums, by the joined kernels."""
    y, places = out(dy.shape), out(dy.shape, dtype=np.int8)
    geometry = (case.stride, case.padding)
    kernels.conv2d_pool_forward(x, weight, bias, y, places, *geometry, num_threads=threads)
    dx, sums = out((*dy.shape[:2], *case.output, dy.shape[4])), np.full((*dy.shape[:2], dy.shape[4]), np.nan)
    kernels.conv2d_pool_output_grad(dy, places, dx, sums, num_threads=threads)
    return y, places, dx, sums


def apart(kernels, case, x, weight, bias, dy):
    """The same but for the places, by a kernel for each operation."""
    between = np.empty((*dy.shape[:2], *case.output, dy.shape[4]), x.dtype)
    kernels.conv2d_forward(x, weight, bias, between, case.stride, case.padding, relu=True)
    y, dx, sums = np.empty_like(dy), np.empty_like(between), np.empty((*dy.shape[:2], dy.shape[4]))
    kernels.max_pool2d_forward(between, y, *WINDOW)
    kernels.max_pool2d_input_grad(between, dy, dx, *WINDOW, relu=True, sums=sums)
    return y, dx, sums


@named(CONVOLUTIONS)
def test_bits_are_those_of_separate_kernels(target, case, arena):
    for bc in channel_blocks(case, target):
        arrays = blocked_arrays(case, target.SIMD_WIDTH, bc)
        guarded = [arena.put(array) for array in arrays]
        y, places, dx, sums = together(target, case, *guarded, lambda *of, **kind: arena.out(*of[0], **kind), threads=2)
        want_y, want_dx, want_sums = apart(target, case, *arrays)
        np.testing.assert_array_equal(y, want_y)
        np.testing.assert_array_equal(dx, want_dx)
        np.testing.assert_array_equal(sums, want_sums)
        assert not padding_lanes(y, case.filters).any()
        np.testing.assert_array_equal(places == -1, y == 0)
        assert places.min(initial=0) >= -1 and places.max(initial=0) <= 3


@named([case for case in CONVOLUTIONS if case.name in ("vgg_a-conv1", "5x5-stride", "many-channels", "wide-row")])
def test_threads_do_not_change_a_bit(target, case):
    arrays = blocked_arrays(case, target.SIMD_WIDTH, target.SIMD_WIDTH)
    first, *others = ([a.tobytes() for a in together(target, case, *arrays, threads=n)] for n in THREADS)
    assert all(other == first for other in others)


def small_arrays(target):
    return Convolution("small", 5, 8, (7, 8), 8, (3, 3)), target.SIMD_WIDTH


def test_without_places_and_bias(target):
    case, b = small_arrays(target)
    x, weight, _, dy = blocked_arrays(case, b, b)
    y, plain = np.full_like(dy, np.nan), np.full_like(dy, np.nan)
    target.conv2d_pool_forward(x, weight, None, y, None, case.stride, case.padding)
    target.conv2d_pool_forward(x, weight, np.zeros(weight.shape[0] * b, np.float32), plain, None, case.stride,
                               case.padding)
    np.testing.assert_array_equal(y, plain)
    assert np.isfinite(y).all()


def test_nan_stays_visible_and_takes_the_gradient(target):
    """The place of a NaN is its own, so that a diverged network is diverged in backward as well."""
    case, b = small_arrays(target)
    x, weight, bias, dy = blocked_arrays(case, b, b)
    x[1, 0, 3, 4, 0] = np.nan
    y, _, dx, sums = together(target, case, x, weight, bias, dy)
    want_y, want_dx, want_sums = apart(target, case, x, weight, bias, dy)
    assert np.isnan(y[1]).any() and not np.isnan(y[0]).any()
    np.testing.assert_array_equal(y, want_y)
    np.testing.assert_array_equal(dx, want_dx)
    np.testing.assert_array_equal(sums, want_sums)


def test_large_arrays_are_those_of_their_halves(target):
    """Arrays so large that they are written past the caches get the same bits as halves, which are not."""
    if target is reference:
        pytest.skip("the twin writes as NumPy does")
    b, size = target.SIMD_WIDTH, 62
    blocks = 2 + 2**22 // (2 * size * size * b)
    x, weight = normal((2, 1, 2 * size, 2 * size, 3), 0), normal((blocks, 1, 1, 1, 3, b), 1)
    bias, dy = normal((blocks * b,), 2), normal((2, blocks, size, size, b), 3)
    y, dx = aligned_zeros(dy.shape), aligned_zeros((2, blocks, 2 * size, 2 * size, b))
    places, sums = np.empty(dy.shape, np.int8), np.empty((2, blocks, b))
    target.conv2d_pool_forward(x, weight, bias, y, places, (1, 1), (0, 0), num_threads=2)
    target.conv2d_pool_output_grad(dy, places, dx, sums, num_threads=2)
    for part in (slice(0, 1), slice(1, 2)):
        half_y, half_dx = (aligned_zeros(a[part].size + 1)[1:].reshape(a[part].shape) for a in (y, dx))  # not aligned
        half_places, half_sums = np.empty_like(places[part]), np.empty_like(sums[part])
        target.conv2d_pool_forward(x[part], weight, bias, half_y, half_places, (1, 1), (0, 0))
        target.conv2d_pool_output_grad(dy[part], half_places, half_dx, half_sums)
        for whole, half in ((y, half_y), (places, half_places), (dx, half_dx), (sums, half_sums)):
            np.testing.assert_array_equal(whole[part], half)


def test_wrong_shapes_are_refused(target):
    case, b = small_arrays(target)
    x, weight, bias, dy = blocked_arrays(case, b, b)
    y, places = np.empty_like(dy), np.empty(dy.shape, np.int8)
    geometry = (case.stride, case.padding)
    with pytest.raises(ValueError, match="wanted a whole window of 2x2"):
        target.conv2d_pool_forward(x[:, :, :3].copy(), weight, bias, y, places, *geometry)
    with pytest.raises(ValueError, match="^y has shape"):
        target.conv2d_pool_forward(x, weight, bias, y[:, :, 1:].copy(), places, *geometry)
    with pytest.raises(ValueError, match="^places has shape"):
        target.conv2d_pool_forward(x, weight, bias, y, places[1:].copy(), *geometry)
    with pytest.raises(ValueError, match="wanted a whole window of 2x2"):
        target.conv2d_pool_output_grad(dy[:, :, :0].copy(), places[:, :, :0].copy(), dy[:, :, :1].copy(), np.empty((1, 1, b)))
    dx, sums = np.empty((*dy.shape[:2], *case.output, b), np.float32), np.empty((*dy.shape[:2], b))
    with pytest.raises(ValueError, match="^dy has shape"):
        target.conv2d_pool_output_grad(dy[1:].copy(), places, dx, sums)
    with pytest.raises(ValueError, match="^sums has shape"):
        target.conv2d_pool_output_grad(dy, places, dx, sums[1:].copy())
