"""Softmax and cross entropy of every target against the float64 twin."""

import numpy as np
import pytest
from blocked import blocks
from test_kernels_conv import EPS, THREADS, normal

from pcldnn._kernels import reference
from pcldnn.layout import aligned_zeros


def run(kernels, logits, labels, scale=1.0, threads=1, spare=0, make=np.array, out=None):
    """Losses and gradient (logical columns); lanes beyond the classes hold 1e30 on entry, to be seen if they count."""
    out = out or (lambda *shape, dtype=np.float32: np.full(shape, np.nan, dtype))
    n, classes = logits.shape
    width = (blocks(classes, kernels.SIMD_WIDTH) + spare) * kernels.SIMD_WIDTH
    padded = np.full((n, width), 1e30, logits.dtype)
    padded[:, :classes] = logits
    losses, dlogits = out(n, dtype=np.float64), out(n, width, dtype=logits.dtype)
    kernels.softmax_cross_entropy(
        make(padded), make(np.asarray(labels, np.int64)), classes, scale, losses, dlogits, num_threads=threads
    )
    assert not dlogits[:, classes:].any()
    return losses, dlogits[:, :classes]


@pytest.mark.parametrize("spread", [1, 30])
@pytest.mark.parametrize("classes", [1, 2, 5, 8, 10, 16, 17, 129, 1000, 9304])
def test_loss(target, classes, spread, arena):
    """Losses within 8 eps (absolute, or of the loss), probabilities within 16 eps."""
    n = 7
    logits, labels = normal((n, classes), 0) * spread, np.random.default_rng(1).integers(0, classes, n)
    want, gradient = run(reference, logits.astype(np.float64), labels, 0.25)
    results = []
    for threads in THREADS:
        losses, dlogits = run(target, logits, labels, 0.25, threads, classes % 2, arena.put, arena.out)
        np.testing.assert_allclose(losses, want, rtol=8 * EPS, atol=8 * EPS)
        np.testing.assert_allclose(dlogits, gradient, rtol=16 * EPS, atol=EPS)
        results.append((losses.tobytes(), dlogits.tobytes()))
    assert len(set(results)) == 1


def test_in_place(target):
    """dlogits may be the logits themselves."""
    b = target.SIMD_WIDTH
    logits, labels = normal((3, 2 * b), 0), np.array([1, 0, 2])
    _, want = run(target, logits, labels)
    target.softmax_cross_entropy(logits, labels, 2 * b, 1.0, np.empty(3), logits)
    np.testing.assert_array_equal(logits, want)


def test_a10_no_saturation(target):
    """Oneflow-Inc/oneflow#3137: logits [-30, 30], label 0."""
    losses, dlogits = run(target, np.array([[-30, 30]], np.float32), [0])
    assert losses[0] == 60.0
    np.testing.assert_allclose(dlogits, [[-1, 1]], atol=1e-7)


def test_large_logits(target):
    """Nothing overflows; an infinite or NaN logit gives a NaN loss for its sample alone."""
    logits = np.array(
        [[3e38, 0, -3e38], [-200, -200, -200], [0, -np.inf, 0], [np.inf, 0, 0], [0, np.nan, 0]], np.float32
    )
    losses, dlogits = run(target, logits, [0, 1, 0, 0, 0])
    np.testing.assert_allclose(losses[:3], [0, np.log(3), np.log(2)], rtol=1e-6)
    np.testing.assert_allclose(dlogits[:3], [[0, 0, 0], [1 / 3, -2 / 3, 1 / 3], [-0.5, 0, 0.5]], atol=1e-6)
    assert np.isnan(losses[3:]).all()


@pytest.mark.parametrize("bad", [5, -1, 1000, -(2**63), 2**63 - 1])
def test_a11_label_out_of_range(target, bad, arena):
    """PaddlePaddle/Paddle#10945: sample, label and class count are named, and no output is touched."""
    logits, labels = arena.put(normal((4, 16), 0)), np.array([0, 4, bad, bad])
    losses, dlogits = arena.out(4, dtype=np.float64), arena.out(4, 16)
    with pytest.raises(ValueError, match=rf"labels\[2\] is {bad}.*5 classes"):
        target.softmax_cross_entropy(logits, labels, 5, 1.0, losses, dlogits)
    assert np.isnan(losses).all() and np.isnan(dlogits).all()


def test_empty_batch(target):
    losses, dlogits = run(target, np.zeros((0, 5), np.float32), [])
    assert losses.shape == (0,) and dlogits.shape == (0, 5)


def test_shapes_are_checked(target):
    b = target.SIMD_WIDTH
    right = {
        "logits": np.zeros((3, b), np.float32),
        "labels": np.zeros(3, np.int64),
        "num_classes": 3,
        "scale": 1.0,
        "losses": np.zeros(3),
        "dlogits": np.zeros((3, b), np.float32),
    }
    target.softmax_cross_entropy(**right)
    for name, value in (
        ("labels", np.zeros(2, np.int64)),
        ("num_classes", b + 1),
        ("num_classes", 0),
        ("losses", np.zeros(4)),
        ("dlogits", np.zeros((3, 2 * b), np.float32)),
        ("num_threads", 0),
    ):
        with pytest.raises(ValueError, match=name):
            target.softmax_cross_entropy(**{**right, name: value})
    if target is not reference:
        with pytest.raises(ValueError, match="multiple of"):
            wide = np.zeros((3, b + 1), np.float32)
            target.softmax_cross_entropy(**{**right, "logits": wide, "dlogits": wide.copy()})


def test_a_large_gradient_is_that_of_its_halves(target):
    """An array so large that it is written past the caches gets the same bits as its halves, which are not."""
    if target is reference:
        pytest.skip("the twin writes as NumPy does")
    n, classes = 600, 7111
    logits, labels = normal((n, classes), 0), np.random.default_rng(1).integers(0, classes, n)
    losses, dlogits = run(target, logits, labels, threads=2, out=aligned_zeros_or_double)
    for part in (slice(0, n // 2), slice(n // 2, n)):
        half_losses, half = run(target, logits[part], labels[part])
        assert np.array_equal(losses[part], half_losses) and np.array_equal(dlogits[part], half)


def aligned_zeros_or_double(*shape, dtype=np.float32):
    return aligned_zeros(shape) if dtype == np.float32 else np.zeros(shape, dtype)
