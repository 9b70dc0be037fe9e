"""Layouts, the conversions at the edges, and the order of parameters in memory."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcldnn.layout import (
    ALIGNMENT,
    Layout,
    aligned_zeros,
    as_float32,
    as_integers,
    bias_from_blocked,
    bias_to_blocked,
    block,
    filter_from_blocked,
    filter_to_blocked,
    linear_from_blocked,
    linear_to_blocked,
    unblock,
)

size = st.integers(1, 20)
lanes = st.sampled_from([1, 3, 4, 8, 16])


def test_layout_knows_both_shapes():
    layout = Layout((10, 5, 7), 8)
    assert layout.channel_blocks == 2
    assert layout.array_shape(3) == (3, 2, 5, 7, 8)
    assert (layout.features, layout.padded_features) == (350, 560)
    assert layout.logical_shape == (10, 5, 7)
    assert layout.flattened().logical_shape == (350,)
    assert layout.flattened().array_shape(3) == layout.array_shape(3)
    assert Layout.vector(429, 16).padded_features == 432


@pytest.mark.parametrize("shape", [0, 1, 17, (2, 3, 5)])
def test_aligned_zeros(shape):
    array = aligned_zeros(shape)
    assert array.ctypes.data % ALIGNMENT == 0 or array.size == 0
    assert array.dtype == np.float32
    assert not array.any()


@given(size, size, st.integers(1, 4), st.integers(1, 4), lanes, lanes)
def test_filters_come_back(out_channels, in_channels, rows, columns, input_block, b):
    weight = np.random.default_rng(0).standard_normal((out_channels, in_channels, rows, columns))
    blocked = filter_to_blocked(weight, input_block, b)
    assert blocked.shape == (-(-out_channels // b), -(-in_channels // input_block), rows, columns, input_block, b)
    assert np.array_equal(filter_from_blocked(blocked, out_channels, in_channels), weight)
    assert np.count_nonzero(blocked) == np.count_nonzero(weight)  # padded lanes are zero
    k, c = out_channels - 1, in_channels - 1
    last = blocked[k // b, c // input_block, :, :, c % input_block, k % b]
    assert np.array_equal(last, weight[k, c])


@given(size, size, st.integers(1, 4), st.integers(1, 4), lanes, st.sampled_from([4, 8, 16]))
def test_linear_columns_follow_the_activations(out_features, channels, height, width, input_block, b):
    """A30: the flattened product is that of the logical arrays, whatever the order in memory."""
    random = np.random.default_rng(0)
    layout = Layout((channels, height, width), input_block, flat=True)
    weight = random.integers(-3, 4, (out_features, layout.features)).astype(np.float32)
    images = random.integers(-3, 4, (2, channels, height, width)).astype(np.float32)
    blocked = linear_to_blocked(weight, layout, b)
    activations = filter_to_blocked(images, input_block, 1).reshape(2, layout.padded_features)
    product = np.einsum("nf,kfi->nki", activations, blocked).reshape(2, -1)[:, :out_features]
    assert np.array_equal(product, images.reshape(2, -1) @ weight.T)
    assert np.array_equal(linear_from_blocked(blocked, layout, out_features), weight)


@given(size, lanes)
def test_bias_comes_back(channels, b):
    bias = np.arange(1, channels + 1, dtype=np.float32)
    blocked = bias_to_blocked(bias, b)
    assert len(blocked) % b == 0
    assert np.array_equal(bias_from_blocked(blocked, channels), bias)
    assert not blocked[channels:].any()


@pytest.mark.parametrize("view", ["x", "x[::-1]", "x[:, ::2]", "x[:, :, ::-1, ::2]", "x.transpose(0, 2, 1, 3)"])
@pytest.mark.parametrize("width", [3, 8])
def test_block_takes_any_strides(target, view, width):
    """A8: never memory order instead of logical order."""
    x = np.random.default_rng(0).standard_normal((3, 6, 6, 4)).astype(np.float32)
    x = eval(view)
    layout = Layout(x.shape[1:], x.shape[1] if width == 3 else target.SIMD_WIDTH)
    blocked = block(x, layout)
    assert blocked.shape == layout.array_shape(3)
    assert np.array_equal(unblock(blocked, layout), x)
    assert np.count_nonzero(blocked) == np.count_nonzero(x)


def test_block_takes_vectors_of_any_strides(target):
    x = np.random.default_rng(0).standard_normal((10, 3)).astype(np.float32).T
    layout = Layout.vector(10, target.SIMD_WIDTH)
    assert np.array_equal(unblock(block(x, layout), layout), x)
    assert np.array_equal(unblock(block(x[::-1, ::-1], layout), layout), x[::-1, ::-1])


@pytest.mark.parametrize("dtype", [bool, np.int8, np.uint8, np.int16, np.uint16, np.float16, np.float32, ">f4"])
def test_exact_types_are_converted(dtype):
    array = as_float32(np.array([[0, 1], [1, 1]], dtype), "x", (2, None))
    assert array.dtype == np.float32
    assert array.tolist() == [[0, 1], [1, 1]]


@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.int64, np.complex64, object, "U1"])
def test_inexact_types_are_refused(dtype):
    with pytest.raises(ValueError, match=r"images: got dtype .*, wanted float32"):
        as_float32(np.zeros((2, 2), dtype), "images", (2, 2))


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match=r"x: got shape \(2, 3\), wanted \(any, 4\)"):
        as_float32(np.zeros((2, 3), np.float32), "x", (None, 4))
    with pytest.raises(ValueError, match=r"labels: got shape \(2, 1\), wanted \(2,\)"):
        as_integers(np.zeros((2, 1), int), "labels", 2)
    for wrong in (np.zeros(2), np.zeros(2, bool), np.zeros(2, np.uint64)):
        with pytest.raises(ValueError, match="labels: got dtype"):
            as_integers(wrong, "labels", 2)
    assert as_integers([], "labels", 0).dtype == np.int64
    assert as_integers(np.array([[1, 2], [3, 4]], np.uint8)[:, 1], "labels", 2).tolist() == [2, 4]
