"""The NumPy twin, which is the oracle of all other kernel tests, against things that are not it.

These are the definitions written as loops, finite differences, the adjoint identity <F x, y> = <x, F* y>, published
test vectors, and PyTorch if it is there. All in float64, where rounding is far below any tolerance used here.
"""

import inspect

import numpy as np
import pytest
from blocked import block, block_filter, unblock
from cases import AWKWARD_CONVOLUTIONS, LINEARS, POOLINGS

from pcldnn import _kernels
from pcldnn._kernels import reference
from pcldnn._kernels.reference_elementwise import philox

B = 4
SMALL_CONVOLUTIONS = [case for case in AWKWARD_CONVOLUTIONS if case.channels < 100]
SMALL_LINEARS = [case for case in LINEARS if case.features * case.outputs < 1e5]
SMALL_POOLINGS = [case for case in POOLINGS if case.size[0] < 50]


def named(cases):
    """Parametrisation over a table of cases."""
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


def normal(*shape, seed=0):
    """Standard normal float64 numbers."""
    return np.random.default_rng(seed).standard_normal(shape)


def conv_arrays(case):
    """x, weight, dy of a convolution, blocked."""
    x = block(normal(case.n, case.channels, *case.size), B)
    weight = block_filter(normal(case.filters, case.channels, *case.kernel, seed=1), B, B)
    dy = block(normal(case.n, case.filters, *case.output, seed=2), B)
    return x, weight, dy


def empty(array):
    """An array of the same shape, full of NaN."""
    return np.full(array.shape, np.nan)


@named(SMALL_CONVOLUTIONS)
def test_convolution_is_the_definition(case):
    x = normal(case.n, case.channels, *case.size)
    weight = normal(case.filters, case.channels, *case.kernel, seed=1)
    bias = normal(case.filters, seed=3)
    (r, s), (sh, sw), (ph, pw), (p, q) = case.kernel, case.stride, case.padding, case.output
    framed = np.pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)))
    want = np.empty((case.n, case.filters, p, q))
    for i in range(p):
        for j in range(q):
            window = framed[:, :, i * sh : i * sh + r, j * sw : j * sw + s]
            want[:, :, i, j] = np.einsum("ncrs,kcrs->nk", window, weight) + bias
    y = empty(block(want, B))
    padded = np.zeros(y.shape[1] * B)
    padded[: case.filters] = bias
    reference.conv2d_forward(block(x, B), block_filter(weight, B, B), padded, y, case.stride, case.padding, relu=True)
    np.testing.assert_allclose(unblock(y, case.filters), np.maximum(want, 0), atol=1e-10)


@named(SMALL_CONVOLUTIONS)
def test_convolution_gradients_are_adjoint(case):
    x, weight, dy = conv_arrays(case)
    y, dx, dweight, weight_t = empty(dy), empty(x), empty(weight), np.empty(np.array(weight.shape)[[1, 0, 2, 3, 5, 4]])
    reference.conv2d_forward(x, weight, None, y, case.stride, case.padding)
    reference.conv2d_transpose_filter(weight, weight_t)
    reference.conv2d_input_grad(dy, weight_t, dx, case.stride, case.padding)
    reference.conv2d_weight_grad(x, dy, dweight, case.stride, case.padding)
    scale = 1e-12 * np.sqrt((y * y).sum() * (dy * dy).sum()) + 1e-12
    assert abs((y * dy).sum() - (x * dx).sum()) <= scale
    assert abs((y * dy).sum() - (weight * dweight).sum()) <= scale


@named(SMALL_LINEARS)
def test_linear_gradients_are_adjoint(case):
    kb = -(-case.outputs // B)
    x, weight, dy = normal(case.n, case.features), normal(kb, case.features, B, seed=1), normal(case.n, kb * B, seed=2)
    bias, y, dx, dweight = normal(kb * B, seed=3), empty(dy), empty(x), empty(weight)
    reference.linear_forward(x, weight, bias, y, relu=True)
    np.testing.assert_allclose(y, np.maximum(np.einsum("nf,kfi->nki", x, weight).reshape(y.shape) + bias, 0), atol=1e-9)
    reference.linear_forward(x, weight, None, y)
    reference.linear_input_grad(dy, weight, dx)
    reference.linear_weight_grad(x, dy, dweight)
    scale = 1e-12 * np.sqrt((y * y).sum() * (dy * dy).sum()) + 1e-12
    assert abs((y * dy).sum() - (x * dx).sum()) <= scale
    assert abs((y * dy).sum() - (weight * dweight).sum()) <= scale


@named(SMALL_POOLINGS)
def test_pooling_is_the_definition(case):
    x = normal(case.n, case.channels, *case.size)
    (kh, kw), (sh, sw), (ph, pw), (h, w) = case.kernel, case.stride, case.padding, case.size
    shape = (case.n, case.channels, *case.output)
    largest, mean, padded_mean = np.empty(shape), np.empty(shape), np.empty(shape)
    for i in range(shape[2]):
        for j in range(shape[3]):
            top, left = i * sh - ph, j * sw - pw
            window = x[:, :, max(top, 0) : top + kh, max(left, 0) : left + kw]
            largest[:, :, i, j], mean[:, :, i, j] = window.max((2, 3)), window.mean((2, 3))
            area = (min(top + kh, h + ph) - top) * (min(left + kw, w + pw) - left)
            padded_mean[:, :, i, j] = window.sum((2, 3)) / area
    y = empty(block(largest, B))
    window = (case.kernel, case.stride, case.padding)
    reference.max_pool2d_forward(block(x, B), y, *window)
    np.testing.assert_array_equal(unblock(y, case.channels), largest)
    for count_include_pad, want in ((False, mean), (True, padded_mean)):
        reference.avg_pool2d_forward(block(x, B), y, *window, count_include_pad)
        np.testing.assert_allclose(unblock(y, case.channels), want, atol=1e-12)


@named(SMALL_POOLINGS)
def test_pooling_gradients(case):
    x, dy = (
        block(normal(case.n, case.channels, *case.size), B),
        block(normal(case.n, case.channels, *case.output, seed=1), B),
    )
    window = (case.kernel, case.stride, case.padding)
    y, dx = empty(dy), empty(x)
    for count_include_pad in (False, True):
        reference.avg_pool2d_forward(x, y, *window, count_include_pad)
        reference.avg_pool2d_input_grad(dy, dx, *window, count_include_pad)
        np.testing.assert_allclose((y * dy).sum(), (x * dx).sum(), atol=1e-9)
    # Where no two pixels are equal the maximum is linear in x nearby: <max(x), dy> = <x, dx> exactly.
    reference.max_pool2d_forward(x, y, *window)
    reference.max_pool2d_input_grad(x, dy, dx, *window)
    np.testing.assert_allclose((y * dy).sum(), (x * dx).sum(), atol=1e-9)


def finite_difference(function, x, dy, h=1e-6):
    """Derivative of <function(x), dy> along each element of x, by central differences."""
    grad = np.empty_like(x)
    for i in np.ndindex(x.shape):
        values = []
        for step in (h, -h):
            moved = x.copy()
            moved[i] += step
            values.append((function(moved) * dy).sum())
        grad[i] = (values[0] - values[1]) / (2 * h)
    return grad


@pytest.mark.parametrize("name", ["relu", "sigmoid", "tanh"])
def test_activation_gradients(name):
    x, dy, dx = normal(2, 2, 3, B), normal(2, 2, 3, B, seed=1), np.full((2, 2, 3, B), np.nan)
    more = (2 * B,) if name == "sigmoid" else ()

    def forward(x):
        y = empty(x)
        getattr(reference, f"{name}_forward")(x, y, *more)
        return y

    getattr(reference, f"{name}_input_grad")(forward(x), dy, dx)
    np.testing.assert_allclose(dx, finite_difference(forward, x, dy), atol=1e-8)


def test_loss_gradient():
    logits, labels = normal(3, 8), np.array([4, 0, 2])
    losses, dlogits = np.full(3, np.nan), np.full((3, 8), np.nan)

    def forward(logits):
        reference.softmax_cross_entropy(logits, labels, 5, 0.25, losses, dlogits)
        return losses.copy()

    want = finite_difference(forward, logits, np.full(3, 0.25))
    forward(logits)
    np.testing.assert_allclose(dlogits, want, atol=1e-8)
    probabilities = np.exp(logits[:, :5]) / np.exp(logits[:, :5]).sum(1, keepdims=True)
    np.testing.assert_allclose(losses, -np.log(probabilities[range(3), labels]), rtol=1e-12)


def test_philox_known_answers():
    """The vectors of Random123 1.14 (kat_vectors, philox4x32 10), by the authors of Salmon et al. 2011."""
    full = 0xFFFFFFFF
    vectors = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((full,) * 4, (full,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for counter, key, words in vectors:
        assert tuple(map(int, philox(counter, key))) == words


def test_every_target_has_every_kernel():
    """The twin's public functions, and none is missing or takes other arguments anywhere."""
    names = {name for name, value in vars(reference).items() if callable(value) and not name.startswith("_")}
    assert len(names) == 33
    for target in _kernels.targets.values():
        for name in names:
            got, want = (list(inspect.signature(getattr(module, name)).parameters) for module in (target, reference))
            assert [word.lower() for word in got] == [word.lower() for word in want], f"{target.TARGET}: {name}"


# PyTorch: an implementation by other people.


@named(SMALL_CONVOLUTIONS)
def test_convolution_against_torch(case):
    torch = pytest.importorskip("torch")
    x, weight, dy = (
        torch.tensor(a, requires_grad=True)
        for a in (
            normal(case.n, case.channels, *case.size),
            normal(case.filters, case.channels, *case.kernel, seed=1),
            normal(case.n, case.filters, *case.output, seed=2),
        )
    )
    want = torch.nn.functional.conv2d(x, weight, None, case.stride, case.padding)
    want.backward(dy)
    bx, bw, bdy = conv_arrays(case)
    y, dx, dweight, weight_t = empty(bdy), empty(bx), empty(bw), np.empty(np.array(bw.shape)[[1, 0, 2, 3, 5, 4]])
    reference.conv2d_forward(bx, bw, None, y, case.stride, case.padding)
    reference.conv2d_transpose_filter(bw, weight_t)
    reference.conv2d_input_grad(bdy, weight_t, dx, case.stride, case.padding)
    reference.conv2d_weight_grad(bx, bdy, dweight, case.stride, case.padding)
    np.testing.assert_allclose(unblock(y, case.filters), want.detach(), atol=1e-9)
    np.testing.assert_allclose(unblock(dx, case.channels), x.grad, atol=1e-9)
    np.testing.assert_allclose(dweight, block_filter(weight.grad.numpy(), B, B), atol=1e-9)


@named([case for case in SMALL_POOLINGS if case.n])
def test_pooling_against_torch(case):
    torch = pytest.importorskip("torch")
    images, grad = (
        normal(case.n, case.channels, *case.size).round(1),
        normal(case.n, case.channels, *case.output, seed=1),
    )
    window = (case.kernel, case.stride, case.padding)
    y, dx = empty(block(grad, B)), empty(block(images, B))

    def compare(function, **options):
        x = torch.tensor(images, requires_grad=True)
        want = function(x, *window, ceil_mode=case.ceil, **options)
        want.backward(torch.tensor(grad))
        np.testing.assert_allclose(unblock(y, case.channels), want.detach(), atol=1e-12)
        np.testing.assert_allclose(unblock(dx, case.channels), x.grad, atol=1e-12)

    reference.max_pool2d_forward(block(images, B), y, *window)
    reference.max_pool2d_input_grad(block(images, B), block(grad, B), dx, *window)
    compare(torch.nn.functional.max_pool2d)
    for include in (False, True):
        reference.avg_pool2d_forward(block(images, B), y, *window, include)
        reference.avg_pool2d_input_grad(block(grad, B), dx, *window, include)
        compare(torch.nn.functional.avg_pool2d, count_include_pad=include)


def test_loss_and_update_against_torch():
    torch = pytest.importorskip("torch")
    logits, labels = normal(6, 9) * 5, np.array([0, 8, 3, 3, 1, 7])
    z = torch.tensor(logits, requires_grad=True)
    want = torch.nn.functional.cross_entropy(z, torch.tensor(labels), reduction="none")
    (want.sum() / 6).backward()
    losses, dlogits = np.empty(6), np.empty((6, 9))
    reference.softmax_cross_entropy(logits, labels, 9, 1 / 6, losses, dlogits)
    np.testing.assert_allclose(losses, want.detach(), atol=1e-12)
    np.testing.assert_allclose(dlogits, z.grad, atol=1e-12)

    weight, momentum = normal(50), np.zeros(50)
    parameter = torch.tensor(weight, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, weight_decay=0.01)
    for step in range(4):
        parameter.grad = torch.tensor(normal(50, seed=step))
        optimizer.step()
        reference.sgd_update(weight, normal(50, seed=step), momentum, 0.1, 0.9, 0.01)
    np.testing.assert_allclose(weight, parameter.detach(), atol=1e-12)
