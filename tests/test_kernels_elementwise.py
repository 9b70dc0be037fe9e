"""Element-wise kernels, bias gradient, SGD update and layout changes of every target against the float64 twin."""

import platform

import numpy as np
import pytest
from blocked import block, blocks, unblock
from test_kernels_conv import EPS, THREADS, normal

from pcldnn import _kernels
from pcldnn._kernels import cpu, reference
from pcldnn._kernels.isa import compiled_for

SIZES = [0, 1, 7, 8, 9, 33, 4095, 4096, 4097, 30011]  # around a vector and around a job
ULPS = {"relu": 0, "sigmoid": 3, "tanh": 7}  # see simd_math.h, (a)


def forward(kernels, name, x, y, threads=1):
    """y = f(x) on one run of floats; the sigmoid sees it as one channel block."""
    if name == "sigmoid":
        b = kernels.SIMD_WIDTH
        padded = np.full((1, 1, blocks(x.size, b), b), 0, x.dtype)
        padded.reshape(-1)[: x.size] = x
        out = np.full_like(padded, np.nan)
        kernels.sigmoid_forward(padded, out, b, num_threads=threads)
        y[...] = out.reshape(-1)[: x.size]
    else:
        getattr(kernels, f"{name}_forward")(x, y, num_threads=threads)


@pytest.mark.parametrize("name", ULPS)
@pytest.mark.parametrize("size", SIZES)
def test_activation(target, name, size, arena):
    x, dy = arena.put(normal((size,), 0) * 3), arena.put(normal((size,), 1))
    y, dx, want = arena.out(size), arena.out(size), np.empty(size)
    forward(target, name, x, y, threads=2)
    forward(reference, name, x.astype(np.float64), want)
    np.testing.assert_allclose(y, want, rtol=EPS * ULPS[name], atol=0)
    gradient = getattr(target, f"{name}_input_grad")
    gradient(y, dy, dx, num_threads=2)
    getattr(reference, f"{name}_input_grad")(y.astype(np.float64), dy.astype(np.float64), want)
    np.testing.assert_allclose(dx, want, rtol=4 * EPS, atol=2 * EPS * 5)
    gradient(y, dy, dy, num_threads=2)
    np.testing.assert_array_equal(dy, dx)  # in place
    forward(target, name, x, x)
    np.testing.assert_array_equal(x, y)
    for threads in THREADS:
        forward(target, name, x, y, threads)


@pytest.mark.parametrize("name", ULPS)
def test_activation_over_all_magnitudes(target, name):
    """A million floats of every exponent, both signs: within the stated units in the last place of float64's value."""
    bits = np.arange(0, 2**32, 4099, dtype=np.uint64).astype(np.uint32)
    x = bits.view(np.float32)
    x = x[np.isfinite(x)]
    y, want = np.empty_like(x), np.empty(x.size)
    forward(target, name, x, y)
    with np.errstate(over="ignore"):
        forward(reference, name, x.astype(np.float64), want)
    normal_result = np.abs(want) >= np.finfo(np.float32).tiny
    error = np.abs(y - want)[normal_result] / np.spacing(np.abs(want[normal_result]).astype(np.float32))
    assert error.max(initial=0) <= ULPS[name]
    assert (np.abs(y[~normal_result]) <= np.finfo(np.float32).tiny).all()


@pytest.mark.parametrize("name", ULPS)
def test_activation_of_special_values(target, name):
    x = np.array([np.nan, np.inf, -np.inf, 0.0] * 9, np.float32)
    want = {"relu": [np.nan, np.inf, 0, 0], "sigmoid": [np.nan, 1, 0, 0.5], "tanh": [np.nan, 1, -1, 0]}[name]
    y = np.empty_like(x)
    forward(target, name, x, y)
    np.testing.assert_allclose(y, want * 9, rtol=4e-7)
    dx = np.empty_like(x)
    target.relu_input_grad(x, np.ones_like(x), dx)
    np.testing.assert_array_equal(dx, [1, 1, 0, 0] * 9)  # a NaN lets the gradient through, as in PyTorch


@pytest.mark.parametrize("channels", [1, 5, 8, 16, 17, 33])
def test_sigmoid_clears_padded_lanes(target, channels):
    b = target.SIMD_WIDTH
    x = block(normal((3, channels, 2, 5), 0), b).reshape(3, blocks(channels, b), 10, b)
    y = np.full_like(x, np.nan)
    target.sigmoid_forward(x, y, channels, num_threads=2)
    flat = y.transpose(0, 1, 3, 2).reshape(3, -1, 10)
    assert (flat[:, :channels] > 0).all() and not flat[:, channels:].any()


def mask(kernels, shape, p=0.5, seed=1, layer=2, epoch=3, ids=None, b=None, threads=1):
    """Which units of (N, C, H, W) dropout keeps."""
    n, c, h, w = shape
    b = b or kernels.SIMD_WIDTH
    x = block(np.ones(shape, np.float32), b)
    y = np.full_like(x, np.nan).reshape(n, x.shape[1], h * w, b)
    ids = np.arange(n) if ids is None else np.array(ids)
    kernels.dropout(x.reshape(y.shape), y, p, seed, layer, epoch, ids, c, num_threads=threads)
    y = unblock(y.reshape(x.shape), x.shape[1] * b)
    assert not y[:, c:].any()
    kept = y[:, :c] != 0
    np.testing.assert_array_equal(y[:, :c][kept], np.float32(1 / (1 - p)))
    return kept


@pytest.mark.parametrize(
    "shape", [(3, 5, 1, 1), (2, 130, 1, 1), (2, 70, 3, 5), (1, 1, 1, 1), (0, 9, 2, 2), (1, 257, 2, 1)]
)
def test_dropout_mask_is_the_same_on_every_target(target, shape):
    """Whatever the SIMD width, also one that no target here has."""
    got = mask(target, shape, threads=2)
    for b in (1, 3, 4, 8, 16):
        np.testing.assert_array_equal(got, mask(reference, shape, b=b))


def test_dropout_depends_on_sample_not_on_place(target):
    """A sample keeps its mask wherever it stands in whatever minibatch; ids beyond 32 bits count in full."""
    ids = [7, 0, 2**40 + 7, 7]
    kept = mask(target, (4, 40, 2, 3), ids=ids)
    np.testing.assert_array_equal(kept[0], kept[3])
    np.testing.assert_array_equal(kept[2:3], mask(target, (1, 40, 2, 3), ids=[2**40 + 7]))
    assert (kept[0] != kept[2]).any() and (kept[0] != kept[1]).any()


def test_dropout_draws_anew(target):
    """Another seed, layer or epoch gives another mask, independent of the first: half of the units differ."""
    first = mask(target, (4, 500, 1, 1))
    for change in ({"seed": 0}, {"layer": 1}, {"epoch": 2}):
        assert abs((first != mask(target, (4, 500, 1, 1), **change)).mean() - 0.5) < 0.06


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 0.999999])
def test_dropout_rate(target, p):
    kept = mask(target, (20, 1000, 1, 1), p)
    assert abs(kept.mean() - (1 - p)) < 5 * np.sqrt(p * (1 - p) / kept.size) + 1e-9
    assert p or kept.all()


def test_dropout_in_place_and_gradient(target, arena):
    """The same call in place gives the gradient; values are scaled by 1/(1-p)."""
    b = target.SIMD_WIDTH
    x = arena.put(block(normal((2, 20, 3, 1), 0), b).reshape(2, blocks(20, b), 3, b))
    y, args = arena.out(*x.shape), (0.3, 5, 0, 1, np.array([4, 9]), 20)
    target.dropout(x, y, *args)
    want = np.empty(x.shape)
    reference.dropout(x.astype(np.float64), want, *args)
    np.testing.assert_allclose(y, want, rtol=4 * EPS)
    target.dropout(x, x, *args)
    np.testing.assert_array_equal(x, y)


def test_dropout_arguments_are_checked(target):
    b = target.SIMD_WIDTH
    x, ids = np.zeros((2, 1, 3, b), np.float32), np.arange(2)
    for wrong, message in (
        (dict(p=1.0), "p is 1.0"),
        (dict(p=-0.1), "p is"),
        (dict(seed=-1), "seed"),
        (dict(epoch=2**32), "epoch"),
        (dict(channels=b + 1), "channels"),
        (dict(sample_ids=np.arange(3)), "sample_ids"),
    ):
        arguments = {"p": 0.5, "seed": 0, "layer": 0, "epoch": 0, "sample_ids": ids, "channels": b, **wrong}
        with pytest.raises(ValueError, match=message):
            target.dropout(x, x.copy(), **arguments)


@pytest.mark.parametrize(
    "shape", [(0, 2, 5), (1, 1, 1), (3, 5, 1), (300, 9, 1), (2, 3, 63), (7, 2, 65), (1, 2, 50176), (70, 17, 9)]
)
def test_bias_gradient(target, shape, arena):
    """Sums hold as many correct digits for a million terms as for ten: 32 roundings of a partial sum, no more."""
    n, kb, m = shape
    b = target.SIMD_WIDTH
    dy = arena.put(normal((n, kb, m, b), 0) + 1)  # all of one sign: the error of a naive sum would grow
    results = []
    for threads in THREADS:
        dbias = arena.out(kb * b)
        target.bias_grad(dy, dbias, num_threads=threads)
        results.append(dbias.tobytes())
    want = dy.astype(np.float64).sum((0, 2)).reshape(-1)
    limit = 32 * EPS / 2 * np.abs(dy.astype(np.float64)).sum((0, 2)).reshape(-1)
    assert (np.abs(dbias - want) <= limit).all()
    assert len(set(results)) == 1


@pytest.mark.parametrize("shape", [(0, 2, 5), (3, 5, 1), (300, 9, 1), (7, 2, 65), (1, 2, 50176), (70, 17, 9)])
def test_relu_and_bias_gradient_in_one_pass(target, shape, arena):
    """Bit for bit what the two passes give."""
    n, kb, m = shape
    b = target.SIMD_WIDTH
    y, dy = (arena.put(normal((n, kb, m, b), seed)) for seed in range(2))
    masked, want = dy.copy(), np.empty(kb * b, np.float32)
    target.relu_input_grad(y, masked, masked)
    target.bias_grad(masked, want)
    for threads in THREADS:
        got, dbias = arena.put(dy), arena.out(kb * b)
        target.relu_bias_grad(y, got, dbias, num_threads=threads)
        np.testing.assert_array_equal(got, masked)
        np.testing.assert_array_equal(dbias, want)


@pytest.mark.parametrize("size", SIZES)
def test_sgd_update(target, size, arena):
    w, g, v = (normal((size,), seed) for seed in range(3))
    for hyper in ((0.1, 0.9, 0.01), (0.5, 0.0, 0.0)):
        want_w, want_v = w.astype(np.float64), v.astype(np.float64)
        reference.sgd_update(want_w, g.astype(np.float64), want_v, *hyper)
        results = []
        for threads in THREADS:
            got_w, got_v = arena.put(w), arena.put(v)
            target.sgd_update(got_w, arena.put(g), got_v, *hyper, num_threads=threads)
            np.testing.assert_allclose(got_v, want_v, atol=16 * EPS)
            np.testing.assert_allclose(got_w, want_w, atol=16 * EPS)
            results.append((got_w.tobytes(), got_v.tobytes()))
        assert len(set(results)) == 1


VIEWS = {
    "plain": lambda x: x,
    "transposed": lambda x: np.ascontiguousarray(x.transpose(0, 1, 3, 2)).transpose(0, 1, 3, 2),
    "channels-last": lambda x: np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2),
    "reversed": lambda x: x[::-1, ::-1, ::-1, ::-1],
    "every-second": lambda x: x[:, :, ::2, ::-2],
    "repeated": lambda x: np.broadcast_to(x[:1, :1, :1, :1], x.shape),
    "no-image": lambda x: x[:0],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("channels", [1, 3, 4, 7, 16, 17, 33])
def test_a8_block_any_view(target, channels, view, arena):
    """microsoft/CNTK#1090: every view is read as what it shows, not as what lies behind it."""
    x = VIEWS[view](normal((2, channels, 5, 6), 0))
    for b in {target.SIMD_WIDTH, channels}:
        want = block(x, b)
        y = arena.out(*want.shape)
        target.block_activations(x, y, num_threads=2)
        np.testing.assert_array_equal(y, want)
        back = arena.out(*x.shape)
        target.unblock_activations(y, back, num_threads=2)
        np.testing.assert_array_equal(back, x)
    strided = np.zeros((2, channels, 10, 12), np.float32)
    n, _, h, w = x.shape
    target.unblock_activations(y, strided[:n, :, : 2 * h : 2, : 2 * w : 2])
    np.testing.assert_array_equal(strided[:n, :, : 2 * h : 2, : 2 * w : 2], x)
    assert np.count_nonzero(strided) == np.count_nonzero(x)


def test_arrays_are_checked(target):
    """Shapes on every target; types and order on the compiled ones, which cannot compute with anything else."""
    b = target.SIMD_WIDTH
    x, y = np.zeros((2, 3, 4, b), np.float32), np.zeros((2, 3, 4, b), np.float32)
    for call in (
        lambda x, y: target.relu_forward(x, y),
        lambda x, y: target.tanh_forward(x, y),
        lambda x, y: target.sigmoid_forward(x, y, 3 * b),
        lambda x, y: target.relu_input_grad(x, x, y),
        lambda x, y: target.tanh_input_grad(x, x, y),
        lambda x, y: target.sigmoid_input_grad(x, x, y),
    ):
        call(x, y)
        with pytest.raises(ValueError, match="y has shape|dx has shape"):
            call(x, y[:1].copy())
        if target is not reference:
            read_only = y.copy()
            read_only.flags.writeable = False
            for wrong in (
                y.astype(np.float64),
                y[::-1],
                y.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3),
                read_only,
            ):
                with pytest.raises(ValueError, match="contiguous|dtype|read-only|wanted"):
                    call(x, wrong)
            with pytest.raises(ValueError, match="contiguous|dtype|wanted"):
                call(x.astype(np.int32), y)
    for call, message in (
        (lambda: target.sigmoid_forward(x, y, 2 * b), "channels"),
        (lambda: target.relu_forward(x, y, num_threads=0), "num_threads"),
        (lambda: target.bias_grad(x, np.zeros(2 * b, np.float32)), "dbias"),
        (lambda: target.relu_bias_grad(x[:1], y, np.zeros(3 * b, np.float32)), "dy has"),
        (lambda: target.sgd_update(*np.zeros((2, 5), np.float32), np.zeros(4, np.float32), 1, 1, 1), "momentum"),
        (lambda: target.block_activations(x, np.zeros((2, 2, 4, b, b), np.float32)), "y has"),
        (lambda: target.unblock_activations(np.zeros((2, 2, 4, b, b), np.float32), x), "x has"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_no_target_is_left_out():
    """Every instruction set of isa.py that this CPU runs was built, so that the tests above ran on it, and the twin."""
    runs = [row for row in compiled_for(platform.machine()) if all(map(cpu.supports, row.features))]
    missing = {row.name for row in runs} - set(_kernels.targets)
    assert not missing, f"not built: {missing}; build without PCLDNN_BUILD_ISAS (python setup.py build_ext --inplace)"
    assert _kernels.targets["reference"] is reference
    assert _kernels.targets[_kernels.TARGET].SIMD_WIDTH == _kernels.SIMD_WIDTH
