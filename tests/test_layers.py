"""Lone layers on logical arrays: the straight way through plan, Unit and kernels, on every target."""

import numpy as np
import pytest
from cases import LAYERS
from on_target import running_on

from pcldnn.layers import (
    AvgPool2d,
    Conv2d,
    CrossEntropyLoss,
    Dropout,
    Flatten,
    Linear,
    MaxPool2d,
    ReLU,
    Sigmoid,
    Tanh,
)
from pcldnn.layout import Layout
from pcldnn.machine import Machine

LINEAR = (Conv2d, Linear, AvgPool2d, Flatten)  # outputs that are linear in the input, but for the bias
table = pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=[f"{layer}-{shape}" for layer, shape in LAYERS])


def integers(shape, seed=0, low=-3, high=3):
    """Small integers: sums of their products are exact in float32, so results can be compared bit for bit."""
    return np.random.default_rng(seed).integers(low, high + 1, shape).astype(np.float32)


def distinct(shape, seed=0):
    """Numbers at least 0.04 apart and away from 0, so that finite differences meet no kink."""
    count = int(np.prod(shape))
    values = 0.04 * (np.arange(count) - count // 2) + 0.02
    return np.random.default_rng(seed).permutation(values).reshape(shape).astype(np.float32)


# --- all layers of the table ------------------------------------------------------------------------------------


@table
def test_gradients_agree_with_finite_differences(target, layer, shape):
    exact = isinstance(layer, LINEAR)
    x = integers((2, *shape)) if exact else distinct((2, *shape)) / 8
    step = 1.0 if exact else 0.01 / 8
    layer.initialize(0)
    if layer.state_dict():
        layer.load_state_dict({name: integers(value.shape, 1) for name, value in layer.state_dict().items()})
    y = layer.forward(x)
    g = integers(y.shape, 2)
    dx, dweights = layer.input_grad(g), layer.weight_grad(g)
    assert dx.shape == x.shape

    def slope(change):
        """Derivative of <forward, g> along one number, by the central difference."""
        ends = []
        for sign in (1, -1):
            change(sign * step)
            ends.append(np.vdot(layer.forward(x).astype(np.float64), g))
            change(-sign * step)
        return (ends[0] - ends[1]) / (2 * step)

    def add_to_input(index):
        def change(by):
            x[index] += by

        return change

    def add_to_parameter(name, index):
        def change(by):
            values = layer.state_dict()
            values[name][index] += by
            layer.load_state_dict(values)

        return change

    random = np.random.default_rng(3)
    tolerance = {"rel": 1e-5} if exact else {"rel": 5e-3, "abs": 1e-2}
    for _ in range(6):
        index = tuple(random.integers(x.shape))
        assert slope(add_to_input(index)) == pytest.approx(dx[index], **tolerance)
    for name, gradient in dweights.items():
        for _ in range(4):
            index = tuple(random.integers(gradient.shape))
            assert slope(add_to_parameter(name, index)) == pytest.approx(gradient[index], **tolerance)


@table
def test_agrees_with_pytorch(target, layer, shape):
    torch = pytest.importorskip("torch")
    arguments = {name: getattr(layer, name) for name in layer.__dataclass_fields__}
    if isinstance(layer, Dropout):
        pytest.skip("other random numbers")
    theirs = getattr(torch.nn, type(layer).__name__)(**arguments)
    x = distinct((3, *shape)) / 8
    layer.initialize(1)
    if layer.state_dict():
        values = {name: value + 0.1 for name, value in layer.state_dict().items()}
        layer.load_state_dict(values)
        theirs.load_state_dict({name: torch.from_numpy(value) for name, value in values.items()})
    tx = torch.from_numpy(x).requires_grad_()
    ty = theirs(tx)
    y = layer.forward(x)
    np.testing.assert_allclose(y, ty.detach().numpy(), rtol=1e-4, atol=1e-4)
    g = distinct(y.shape, 1)
    ty.backward(torch.from_numpy(g))
    np.testing.assert_allclose(layer.input_grad(g), tx.grad.numpy(), rtol=1e-4, atol=2e-4)
    for name, gradient in layer.weight_grad(g).items():
        np.testing.assert_allclose(gradient, getattr(theirs, name).grad.numpy(), rtol=1e-4, atol=5e-3)


@table
def test_any_strides_give_the_result_of_the_copy(target, layer, shape):
    """A8: for the input, the output gradient and the weights."""
    layer.initialize(0)
    wide = integers((4, *(2 * size for size in shape)))
    crop = tuple(slice(None, None, 2) for _ in shape)
    x = wide[(slice(None, None, -1), *crop)]
    assert not x.flags.c_contiguous
    y = layer.forward(x)
    assert np.array_equal(y, layer.forward(x.copy()))
    g = np.asfortranarray(integers(y.shape, 2)[::-1])
    for gradient in (layer.input_grad, layer.weight_grad):
        one, copied = gradient(g), gradient(np.ascontiguousarray(g))
        assert str(one) == str(copied)
        assert all(np.array_equal(a, b) for a, b in zip(one, copied))
    weights = layer.state_dict()
    layer.load_state_dict({name: np.asfortranarray(value) for name, value in weights.items()})
    assert np.array_equal(y, layer.forward(x))


@table
def test_empty_batch(target, layer, shape):
    """A7."""
    layer.initialize(0)
    y = layer.forward(np.empty((0, *shape), np.float32))
    assert len(y) == 0
    assert layer.input_grad(y).shape == (0, *shape)
    gradients = layer.weight_grad(y)
    assert {name: value.shape for name, value in gradients.items()} == {
        name: value.shape for name, value in layer.state_dict().items()
    }
    assert all(not value.any() for value in gradients.values())


@table
def test_layers_are_values(layer, shape):
    twin = type(layer)(**{name: getattr(layer, name) for name in layer.__dataclass_fields__})
    assert twin == layer
    assert hash(twin) == hash(layer)
    assert eval(repr(layer)) == layer
    with pytest.raises(AttributeError):
        layer.anything = 1


def test_the_table_has_a_row_of_every_layer():
    """Who adds a layer adds a row to tests/cases.py."""
    from pcldnn import layers

    kinds = {getattr(layers, name) for name in layers.__all__} - {layers.Layer, layers.CrossEntropyLoss}
    assert kinds == {type(layer) for layer, _ in LAYERS}


# --- convolution ------------------------------------------------------------------------------------------------


def test_stride_that_leaves_rows_unused(target):
    """A1: 32x32, kernel 5x5, stride 3, padding 1, all ones."""
    conv = Conv2d(9, 3, 5, stride=3, padding=1, bias=False)
    conv.load_state_dict({"weight": np.ones((3, 9, 5, 5), np.float32)})
    y = conv.forward(np.ones((1, 9, 32, 32), np.float32))
    assert y.shape == (1, 3, 10, 10)
    c = np.array([1, 1, 2, 2, 1, 2, 2, 1, 2, 2, 1, 2, 2, 1, 2, 2, 1, 2, 2, 1, 2, 2, 1, 2, 2, 1, 2, 2, 1, 1, 1, 0])
    dx = conv.input_grad(np.ones_like(y))
    assert np.array_equal(dx, np.broadcast_to(3 * np.outer(c, c), dx.shape))
    assert dx.sum() == 64827


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33])
def test_any_channel_count_is_exact(target, channels):
    """A2, A4: C crosses every SIMD width, K = 2C and K = 1; also through the padded lanes."""
    for out_channels in (1, 2 * channels):
        conv = Conv2d(channels, out_channels, 3, padding=1)
        weight, bias = integers((out_channels, channels, 3, 3)), integers(out_channels, 1)
        conv.load_state_dict({"weight": weight, "bias": bias})
        x = integers((2, channels, 5, 4), 2)
        framed = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
        taps = np.stack([framed[:, :, r : r + 5, s : s + 4] for r in range(3) for s in range(3)])
        kernels = weight.reshape(out_channels, channels, 9)
        y = np.einsum("tnchw,kct->nkhw", taps, kernels) + bias[:, None, None]
        assert np.array_equal(conv.forward(x), y)
        g = integers(y.shape, 3)
        gradients = conv.weight_grad(g)
        assert np.array_equal(gradients["weight"], np.einsum("tnchw,nkhw->kct", taps, g).reshape(weight.shape))
        assert np.array_equal(gradients["bias"], g.sum((0, 2, 3)))
        spread = np.zeros_like(framed)
        for t in range(9):
            spread[:, :, t // 3 : t // 3 + 5, t % 3 : t % 3 + 4] += np.einsum("nkhw,kc->nchw", g, kernels[:, :, t])
        assert np.array_equal(conv.input_grad(g), spread[:, :, 1:-1, 1:-1])


def test_padding_larger_than_the_kernel(target):
    """A5; the gradient of its case (b) is in the table of cases."""
    conv = Conv2d(1, 1, 3, padding=3, bias=False)
    conv.load_state_dict({"weight": np.ones((1, 1, 3, 3), np.float32)})
    y = conv.forward(np.ones((1, 1, 1, 1), np.float32))[0, 0]
    assert np.array_equal(y, np.pad(np.ones((3, 3)), 1))
    assert Conv2d(2, 3, 3, padding=4).forward(np.zeros((1, 2, 11, 14), np.float32)).shape == (1, 3, 17, 20)


@pytest.mark.parametrize("out_channels", [1, 2, 3, 6, 24, 72])
def test_only_logical_channels_are_seen(target, out_channels):
    """A3, A4."""
    conv = Conv2d(5, out_channels, 3)
    y = conv.forward(integers((1, 5, 4, 4)))
    assert y.shape == (1, out_channels, 2, 2)
    assert {name: value.shape for name, value in conv.state_dict().items()} == {
        "weight": (out_channels, 5, 3, 3),
        "bias": (out_channels,),
    }
    assert conv.weight_grad(y)["weight"].shape == (out_channels, 5, 3, 3)
    plan = conv.plan(Layout((5, 4, 4), target.SIMD_WIDTH), 1, Machine.detect())
    assert plan.parameter_count == out_channels * (45 + 1)


def test_kernel_larger_than_the_input_is_refused():
    """A6."""
    wanted = r"Conv2d\(in_channels=1.*size 2 with padding 0 is smaller than the kernel of size 3 \(stride 1\)"
    with pytest.raises(ValueError, match=wanted):
        Conv2d(1, 1, 3).forward(np.zeros((1, 1, 2, 2), np.float32))


# --- pooling ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [MaxPool2d, AvgPool2d])
def test_floor_and_ceil_rule(target, kind):
    """A9."""
    x = np.zeros((1, 1, 112, 112), np.float32)
    assert kind(3, 2).forward(x).shape == (1, 1, 55, 55)
    ceil = kind(3, 2, ceil_mode=True)
    y = ceil.forward(distinct(x.shape))
    assert y.shape == (1, 1, 56, 56)
    g = np.zeros_like(y)
    g[0, 0, 55, 55] = 4  # the last window is clipped to 2x2
    dx = ceil.input_grad(g)
    assert dx.sum() == 4
    assert not dx[0, 0, :110].any()
    if kind is AvgPool2d:
        assert np.array_equal(dx[0, 0, 110:, 110:], np.ones((2, 2)))


def test_first_maximum_gets_the_gradient(target):
    pool = MaxPool2d(2)
    pool.forward(np.zeros((1, 1, 2, 2), np.float32))
    assert pool.input_grad(np.ones((1, 1, 1, 1), np.float32)).ravel().tolist() == [1, 0, 0, 0]


# --- element-wise, dropout, loss --------------------------------------------------------------------------------


def test_activations(target):
    x = np.array([[-100, -1, 0, 0.5, 100]], np.float32)
    assert np.array_equal(ReLU().forward(x), np.maximum(x, 0))
    np.testing.assert_allclose(Sigmoid().forward(x), 1 / (1 + np.exp(-x.astype(float))), rtol=1e-6, atol=1e-30)
    np.testing.assert_allclose(Tanh().forward(x), np.tanh(x), rtol=1e-6)
    assert np.isnan(ReLU().forward(np.array([[np.nan]], np.float32)))


def test_dropout(target):
    drop = Dropout(0.25)
    drop.initialize(7)
    x = np.ones((200, 3, 5, 7), np.float32)
    y = drop.forward(x, epoch=3, sample_ids=np.arange(200))
    assert set(np.unique(y)) == {0, np.float32(1 / 0.75)}
    assert np.mean(y == 0) == pytest.approx(0.25, abs=0.02)
    assert np.array_equal(drop.input_grad(x), y)  # the same mask
    assert np.array_equal(drop.forward(x, training=False), x)
    order = np.random.default_rng(0).permutation(200)
    assert np.array_equal(drop.forward(x, epoch=3, sample_ids=order), y[order])  # depends on the sample alone
    assert not np.array_equal(drop.forward(x, epoch=4, sample_ids=np.arange(200)), y)
    with pytest.raises(ValueError, match="sample_ids"):
        drop.forward(x, sample_ids=[1, 2])


def test_dropout_does_not_depend_on_the_target():
    from pcldnn import _kernels

    masks = []
    for name in _kernels.targets:
        with running_on(name):
            masks.append(Dropout(0.5).forward(np.ones((3, 21, 2, 3), np.float32)))
    assert all(np.array_equal(mask, masks[0]) for mask in masks)


def test_loss_does_not_saturate(target):
    """A10."""
    loss = CrossEntropyLoss()
    assert loss.forward(np.array([[-30, 30]], np.float32), [0]) == 60.0
    np.testing.assert_allclose(loss.input_grad(), [[-1, 1]], rtol=1e-6)


def test_loss_and_gradient(target):
    logits, labels = distinct((6, 5)), np.array([0, 4, 2, 2, 1, 3], np.uint8)
    loss = CrossEntropyLoss()
    exponentials = np.exp(logits.astype(float))
    softmax = exponentials / exponentials.sum(1, keepdims=True)
    rows = np.arange(6)
    assert loss.forward(logits, labels) == pytest.approx(-np.log(softmax[rows, labels]).mean())
    softmax[rows, labels] -= 1
    np.testing.assert_allclose(loss.input_grad(), softmax / 6, atol=1e-6)
    assert loss.forward(logits[::-1].T.copy().T, labels[::-1]) == pytest.approx(loss.forward(logits, labels))


@pytest.mark.parametrize("label", [5, -1, 1000])
def test_label_outside_the_classes(target, label):
    """A11."""
    labels = [0, 1, label]
    with pytest.raises(ValueError, match=rf"labels\[2\] is {label}.*5 classes"):
        CrossEntropyLoss().forward(np.zeros((3, 5), np.float32), labels)


# --- what users get wrong ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Conv2d(0, 3, 3), "0 to 3 channels"),
        (lambda: Conv2d(3, 3, 0), "kernel_size: got 0"),
        (lambda: Conv2d(3, 3, 3, stride=(1, 2, 3)), "stride: got"),
        (lambda: Conv2d(3, 3, 3, padding=-1), "padding: got -1"),
        (lambda: Linear(3, 0), "3 to 0 features"),
        (lambda: MaxPool2d(2, padding=2), "wanted at most half"),
        (lambda: AvgPool2d(2, stride=0), "stride: got 0"),
        (lambda: Dropout(1.0), "got 1.0"),
        (lambda: ReLU().forward(np.zeros(3, np.float32)), r"x: got shape \(3,\)"),
        (lambda: ReLU().forward(np.zeros((3, 3))), "x: got dtype float64"),
        (lambda: Linear(4, 2).forward(np.zeros((3, 5), np.float32)), "5 features"),
        (lambda: Linear(4, 2).input_grad(np.zeros((3, 2), np.float32)), "call forward first"),
        (lambda: CrossEntropyLoss().input_grad(), "call forward first"),
        (lambda: Linear(4, 2).load_state_dict({"weight": np.zeros((2, 4))}), r"wanted \['bias', 'weight'\]"),
        (lambda: CrossEntropyLoss().forward(np.zeros((2, 3), np.float32), [0.0, 1.0]), "labels: got dtype float64"),
        (lambda: CrossEntropyLoss().forward(np.zeros((2, 3), np.float32), [0]), "labels: got shape"),
    ],
)
def test_mistakes_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_wrong_gradient_shape_is_named():
    layer = Linear(4, 2)
    layer.forward(np.zeros((3, 4), np.float32))
    with pytest.raises(ValueError, match=r"dy: got shape \(3, 3\), wanted \(3, 2\)"):
        layer.input_grad(np.zeros((3, 3), np.float32))
