"""Network: training steps against an independent float64 computation, memory, ranks' shares."""

import dataclasses

import numpy as np
import pytest
from on_target import running_on
from small_network import SHAPE, SMALL, batch, step

import pcldnn.network
from pcldnn import SGD, Network, _kernels
from pcldnn.communicator import SerialCommunicator
from pcldnn.layers import Conv2d, Dropout, Flatten, Linear, MaxPool2d, ReLU, Sigmoid, Tanh
from pcldnn.layers.base import LayerPlan
from pcldnn.plan import plan


def assert_close(one, other, rtol=1e-5, atol=1e-6):
    assert one.keys() == other.keys()
    for name, value in one.items():
        scale = np.abs(other[name]).max(initial=0)
        np.testing.assert_allclose(value, other[name], rtol=rtol, atol=atol + rtol * scale, err_msg=name)


# --- numbers ----------------------------------------------------------------------------------------------------


class Oracle:
    """The same network in float64, one layer after the other, straight from the definitions."""

    def __init__(self, network):
        self.layers = network.layers
        self.w = {name: value.astype(np.float64) for name, value in network.state_dict().items()}

    def loss(self, images, labels):
        x = images.astype(np.float64)
        for name, layer in self.layers:
            x = self.apply(name, layer, x)
        x = x - x.max(1, keepdims=True)
        return (np.log(np.exp(x).sum(1)) - x[np.arange(len(x)), labels]).sum()

    def apply(self, name, layer, x):
        if isinstance(layer, Conv2d):
            (r, s), (ph, pw) = layer.kernel_size, layer.padding
            x = np.pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)))
            windows = np.lib.stride_tricks.sliding_window_view(x, (r, s), (2, 3))
            windows = windows[:, :, :: layer.stride[0], :: layer.stride[1]]
            return np.einsum("nchwrs,kcrs->nkhw", windows, self.w[f"{name}.weight"]) + (
                self.w[f"{name}.bias"][:, None, None]
            )
        if isinstance(layer, Linear):
            return x @ self.w[f"{name}.weight"].T + self.w[f"{name}.bias"]
        if isinstance(layer, MaxPool2d):
            n, c, h, w = x.shape
            return x[:, :, : h // 2 * 2, : w // 2 * 2].reshape(n, c, h // 2, 2, w // 2, 2).max((3, 5))
        if isinstance(layer, Flatten):
            return x.reshape(len(x), -1)
        if isinstance(layer, ReLU):
            return np.maximum(x, 0)
        assert isinstance(layer, Tanh | Sigmoid)
        return np.tanh(x) if isinstance(layer, Tanh) else 1 / (1 + np.exp(-x))


@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        (
            [Conv2d(3, 10, 3, padding=1), ReLU(), MaxPool2d(2), Conv2d(10, 4, 2), Tanh(), Flatten(), Linear(24, 5)],
            (3, 7, 9),
        ),
        ([Conv2d(7, 5, 3), Sigmoid(), Flatten(), Linear(45, 18), ReLU(), Linear(18, 5)], (7, 5, 5)),
        ([Flatten(), Linear(56, 11), Sigmoid(), Linear(11, 5)], (1, 7, 8)),
        ([Linear(13, 9), Sigmoid(), Linear(9, 21), Tanh(), Linear(21, 5)], (13,)),
        ([Linear(3, 5)], (3,)),
        ([Flatten(), Linear(30, 5)], (5, 2, 3)),
    ],
)
def test_step_agrees_with_float64(target, layers, shape):
    """Loss, logits and sampled gradients, through every kind of border between layers."""
    network = Network(layers, shape, seed=3)
    network.prepare(6)
    images, labels = batch(6, shape)
    loss, _, gradients = step(network, images, labels)
    oracle = Oracle(network)
    assert loss == pytest.approx(oracle.loss(images, labels), rel=1e-5)
    random = np.random.default_rng(1)
    for name, gradient in gradients.items():
        for _ in range(5):
            index = tuple(random.integers(gradient.shape))
            ends = []
            for sign in (1e-5, -1e-5):
                oracle.w[name][index] += sign
                ends.append(oracle.loss(images, labels) / 6)
                oracle.w[name][index] -= sign
            assert gradient[index] == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=2e-4, abs=2e-6), (name, index)


def test_step_agrees_with_pytorch(target):
    torch = pytest.importorskip("torch")
    layers = [layer for layer in SMALL if not isinstance(layer, Dropout)]
    network = Network(layers, SHAPE)
    network.prepare(5)
    theirs = torch.nn.Sequential(*(
        getattr(torch.nn, type(layer).__name__)(**{f: getattr(layer, f) for f in layer.__dataclass_fields__})
        for layer in layers
    ))  # fmt: skip
    values = [torch.from_numpy(value) for value in network.state_dict().values()]
    theirs.load_state_dict(dict(zip(theirs.state_dict(), values)))
    sgd = torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    optimizer = SGD(0.05, momentum=0.9, weight_decay=0.01)
    for i in range(5):
        images, labels = batch(seed=i)
        loss, *_ = step(network, images, labels, optimizer)
        sgd.zero_grad()
        their_loss = torch.nn.functional.cross_entropy(theirs(torch.from_numpy(images)), torch.from_numpy(labels))
        their_loss.backward()
        sgd.step()
        assert loss / 5 == pytest.approx(their_loss.item(), rel=1e-4)
    ours = dict(zip(theirs.state_dict(), network.state_dict().values()))
    assert_close(ours, {name: value.numpy() for name, value in theirs.state_dict().items()}, rtol=1e-4)


def test_every_target_trains_alike():
    """Initialisation, data order and dropout do not depend on the SIMD width: only rounding differs."""
    results = []
    for name in _kernels.targets:
        with running_on(name):
            network, optimizer = Network(SMALL, SHAPE, seed=5), SGD(0.1, momentum=0.9, weight_decay=0.001)
            network.prepare(5)
            start = network.state_dict()
            for i in range(4):
                step(network, *batch(seed=i), optimizer, epoch=i)
            results.append((name, start, network.state_dict()))
    for _, start, end in results[1:]:
        assert all(np.array_equal(start[name], results[0][1][name]) for name in start)
        assert_close(end, results[0][2], rtol=1e-4)


def test_first_layer_after_convolutions_crosses_over(target):
    """A30: conv, pool, fully connected on a 3x2 map of 5 channels; weights in, logits, weights out."""
    network = Network([Conv2d(2, 5, 3, padding=1), ReLU(), MaxPool2d(2), Flatten(), Linear(30, 4)], (2, 6, 4))
    random = np.random.default_rng(0)
    start = network.state_dict()
    values = {name: random.standard_normal(value.shape).astype(np.float32) for name, value in start.items()}
    network.load_state_dict(values)
    back = network.state_dict()
    assert all(np.array_equal(values[name], back[name]) for name in values)
    images, _ = batch(1, (2, 6, 4))
    oracle = Oracle(network)
    x = images.astype(np.float64)
    for name, layer in network.layers:
        x = oracle.apply(name, layer, x)
    np.testing.assert_allclose(network.forward(images), x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("classes", [1, 3, 5, 7])
def test_odd_channel_counts_train(target, classes):
    """A4: the last convolution has 1, 3, 5, 7 channels; 5 steps agree with another target's."""
    layers = [Conv2d(3, 6, 3), ReLU(), Conv2d(6, classes, 4), Flatten()]
    network, optimizer = Network(layers, (3, 6, 6)), SGD(0.1, momentum=0.5)
    network.prepare(4)
    images, labels = batch(4, (3, 6, 6), classes)
    losses = [step(network, images, labels, optimizer)[0] for _ in range(5)]
    oracle = Oracle(network)
    assert network.forward_loss(images, labels)[0] == pytest.approx(oracle.loss(images, labels), rel=1e-5, abs=1e-6)
    assert losses[-1] < losses[0] or classes == 1
    assert network.forward(images).shape == (4, classes)
    assert network.state_dict()["features.2.weight"].shape == (classes, 6, 4, 4)


def test_padded_lanes_stay_zero(target):
    """A3: the norm over memory is the norm over logical weights, also after steps with momentum and weight decay."""
    layers = [Conv2d(3, 6, 3, padding=1), Sigmoid(), Flatten(), Linear(252, 5), Sigmoid(), Linear(5, 3)]
    network, optimizer = Network(layers, SHAPE), SGD(0.5, momentum=0.9, weight_decay=0.1)
    network.prepare(5)
    for i in range(3):
        step(network, *batch(classes=3, seed=i), optimizer)
    momentum = optimizer.state_dict(network)
    for kept, logical in ((network.parameters, network.state_dict()), (optimizer._shards, momentum)):
        in_memory = sum(np.count_nonzero(value) for value in kept.values())
        assert in_memory == sum(np.count_nonzero(value) for value in logical.values())


# --- memory -----------------------------------------------------------------------------------------------------


def test_nothing_reads_dead_memory(target):
    """All of the arena is NaN before each pass; scratch and outputs must be written before they are read."""
    network, optimizer = Network(SMALL, SHAPE), SGD(0.1)
    network.prepare(5)
    for i in range(2):
        network._passes.arena[:] = np.nan
        loss, logits, gradients = step(network, *batch(seed=i), optimizer)
        assert np.isfinite(loss)
        assert np.isfinite(logits).all()
        assert all(np.isfinite(gradient).all() for gradient in gradients.values())
    network._passes.arena[:] = np.nan
    assert np.isfinite(network.forward(batch()[0])).all()


def test_sharing_memory_changes_nothing(target, monkeypatch):
    """The planned arena against one in which no two arrays meet, bit for bit."""

    def spread(*arguments, **options):
        made, offset, buffers = plan(*arguments, **options), 0, []
        for buffer in made.buffers:
            buffers.append(dataclasses.replace(buffer, offset=offset))
            offset += -(-buffer.size // 16) * 16
        return dataclasses.replace(made, buffers=tuple(buffers))

    results = []
    for make in (plan, spread):
        monkeypatch.setattr(pcldnn.network, "plan", make)
        network = Network(SMALL, SHAPE)
        network.prepare(5)
        results.append((network.prepared.arena_size, step(network, *batch())))
    (size, (loss, logits, gradients)), (larger, (other_loss, other_logits, other_gradients)) = results
    assert size < larger
    assert loss == other_loss
    assert np.array_equal(logits, other_logits)
    assert all(np.array_equal(gradients[name], other_gradients[name]) for name in gradients)


def test_fused_relu_is_the_relu(target, monkeypatch):
    fused = Network(SMALL, SHAPE)
    fused.prepare(5)
    monkeypatch.setattr(Conv2d, "absorbs", lambda self, following: False)
    monkeypatch.setattr(Linear, "absorbs", lambda self, following: False)
    plain = Network(SMALL, SHAPE)
    assert [layer.fused for layer in plain.prepare(5).layers] == [None] * len(SMALL)
    one, other = step(fused, *batch()), step(plain, *batch())
    assert one[0] == pytest.approx(other[0], rel=1e-6)
    assert_close(one[2], other[2])


@pytest.mark.parametrize("bias", [True, False])
def test_fused_pooling_is_the_pooling(target, monkeypatch, bias):
    """To the last bit, also of a smaller minibatch than that of the plan, and twice."""
    layers = [Conv2d(3, 10, 3, padding=1, bias=bias), ReLU(), MaxPool2d(2), MaxPool2d(2), Conv2d(10, 6, 3), ReLU(),
              MaxPool2d(2), Flatten(), Linear(6 * 2 * 3, 5)]  # fmt: skip
    fused, shape = Network(layers, (3, 27, 33)), (3, 27, 33)
    assert [layer.name for layer in fused.prepare(5).layers if layer.pooled] == ["features.0"]
    monkeypatch.setattr(Conv2d, "pools", lambda self, plan, following: False)
    plain = Network(layers, shape)
    assert not any(layer.pooled for layer in plain.prepare(5).layers)
    images, labels = batch(5, shape)
    for count in (5, 3, 5):
        one, other = (step(network, images[:count], labels[:count]) for network in (fused, plain))
        assert one[0] == other[0] and np.array_equal(one[1], other[1])
        assert all(np.array_equal(one[2][name], other[2][name]) for name in one[2])
    plain.prepare(4, training=False)
    monkeypatch.undo()
    assert [layer.name for layer in fused.prepare(4, training=False).layers if layer.pooled] == ["features.0"]
    assert np.array_equal(fused.forward(images), plain.forward(images))


def test_a_smaller_minibatch_uses_the_leading_images(target):
    """The last minibatch of an epoch: buffers are larger than it."""
    images, labels = batch(8)
    large, exact = Network(SMALL, SHAPE), Network(SMALL, SHAPE)
    large.prepare(8)
    exact.prepare(3)
    step(large, images, labels)
    one, other = step(large, images[:3], labels[:3]), step(exact, images[:3], labels[:3])
    assert one[0] == pytest.approx(other[0], rel=1e-6)
    assert_close(one[2], other[2])


def test_inference_takes_any_number_of_images(target):
    network = Network(SMALL, SHAPE)
    images, labels = batch(9)
    unprepared = network.forward(images)
    assert unprepared.shape == (9, 5)
    assert network.forward(images[:0]).shape == (0, 5)
    network.prepare(4)  # now in pieces of 4, with dropout layers that are off
    np.testing.assert_allclose(network.forward(images), unprepared, rtol=1e-5, atol=1e-6)
    kept = network.forward(images)
    network.forward_loss(images[:4], labels[:4])
    np.testing.assert_allclose(kept, unprepared, rtol=1e-5, atol=1e-6)  # a copy, not a view
    assert Network([Conv2d(3, 6, 3)], SHAPE).forward(images).shape == (9, 6, 4, 5)


# --- shares of several ranks, as one process can see them ----------------------------------------------------------


def test_gradients_are_weighted_by_the_global_count(target):
    """A15: 2 samples here and 1 there give the gradient of the mean over 3; an empty share gives exactly 0."""
    images, labels = batch(3)
    ids = np.array([10, 20, 30])
    whole, part = Network(SMALL, SHAPE), Network(SMALL, SHAPE)
    whole.prepare(3)
    part.prepare(3)
    loss, _, wanted = step(whole, images, labels, sample_ids=ids, epoch=1)
    total, summed = 0.0, None
    for piece in (slice(0, 2), slice(2, 3), slice(3, 3)):
        for unit in part._passes.units:
            if unit.gradients is not None:
                unit.gradients[:] = np.nan  # A7: overwritten even when there is nothing to sum
        share_loss, _, gradients = step(
            part, images[piece], labels[piece], sample_ids=ids[piece], epoch=1, global_count=3
        )
        total += share_loss
        summed = {name: gradients[name] + (summed[name] if summed else 0) for name in gradients}
        if piece.start == 3:
            assert share_loss == 0
            assert all(not gradient.any() for gradient in gradients.values())
    assert total == pytest.approx(loss, rel=1e-6)
    assert_close(summed, wanted)


def test_one_weight_and_three_samples(target):
    """A15 in its own numbers: gradients 0, 0 and 3 in shares of two and one make 1.0, not 1.5."""
    network = Network([Linear(1, 2, bias=False)], (1,))
    network.load_state_dict({"0.weight": np.zeros((2, 1), np.float32)})
    network.prepare(3)
    parts = []
    for values in ([0.0, 0.0], [6.0]):  # gradient of the second weight: (softmax 1/2) * x
        images = np.array(values, np.float32)[:, None]
        parts.append(step(network, images, [0] * len(values), global_count=3)[2]["0.weight"][1, 0])
    assert sum(parts) == 1.0


class Peers(SerialCommunicator):
    """A communicator of one rank among several whose peers hold the same numbers."""

    def __init__(self, rank, size):
        super().__init__()
        self.rank, self.size, self.calls = rank, size, []

    def agree(self, description):
        self.description = description

    def grid(self, partition):
        assert partition.model == 1
        return self, SerialCommunicator()

    def part_reduce(self, parts):
        self.calls += [("reduce_scatter", *sizes(part)) for part in parts]

    def part_broadcast(self, parts):
        self.calls += [("allgather", *sizes(part)) for part in parts]


def sizes(part):
    buffer, spans = part
    return buffer.size, tuple(stop - start for start, stop in spans)


@pytest.mark.parametrize("rank", [0, 2, 6])
def test_each_rank_updates_the_shard_it_owns(rank):
    """7 ranks for some layers with fewer vectors than that; messages go as planned; the rest is left alone."""
    network, peers = Network(SMALL, SHAPE), Peers(rank, 7)
    planned = network.prepare(14, peers)
    assert planned.images == 2
    before = {name: value.copy() for name, value in network.parameters.items()}
    optimizer = SGD(0.1, momentum=0.9)
    step(network, *batch(2), optimizer, global_count=14)
    assert peers.calls == [(m.kind, sum(m.sizes), m.sizes) for m in planned.messages]
    for unit in network._passes.units:
        if unit.plan.parameters:
            own = network._weights.placements[unit.name].own
            wanted = before[unit.name]
            wanted[own] -= np.float32(0.1) * unit.gradients[own]
            np.testing.assert_allclose(unit.parameters, wanted, rtol=1e-6)
            assert optimizer._shards[unit.name].size == own.stop - own.start
    assert peers.description["seed"] == "0"
    assert "layer features.0" in peers.description


# --- the arguments ------------------------------------------------------------------------------------------------


def test_arrays_of_any_strides(target):
    """A8."""
    wide = np.random.default_rng(0).standard_normal((4, 7, 6, 6)).astype(np.float32)
    images, labels = wide[::-1, :, :, ::2].transpose(0, 3, 2, 1), np.arange(8, dtype=np.int32)[::-2] // 2
    network = Network(SMALL, SHAPE)
    network.prepare(4)
    copied = step(network, images.copy(), labels.copy())
    viewed = step(network, images, labels, sample_ids=range(4))
    assert copied[0] == viewed[0]
    assert np.array_equal(network.forward(images), network.forward(images.copy()))
    pixels = np.random.default_rng(0).integers(0, 256, (2, *SHAPE), np.uint8)
    assert np.array_equal(network.forward(pixels), network.forward(pixels.astype(np.float32)))
    vector = Network([Linear(6, 2)], (6,))
    x = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32).T
    assert np.array_equal(vector.forward(x[::-1]), vector.forward(x[::-1].copy()))
    assert np.array_equal(vector.forward(x[:, :, None, None]), vector.forward(x))  # as data sets of images hold them
    transposed = {name: np.asfortranarray(value) for name, value in network.state_dict().items()}
    network.load_state_dict(transposed)
    assert all(np.array_equal(value, network.state_dict()[name]) for name, value in transposed.items())


def test_one_unit_a_planned_layer():
    network = Network(SMALL, SHAPE)
    network.prepare(5)
    assert all(isinstance(unit.plan, LayerPlan) for unit in network._passes.units)
    assert repr(network) == f"Network(12 layers, (3, 6, 7) to (5,), {network.parameter_count:,} parameters)"
    assert network.parameter_count == 10 * 28 + 9 * 91 + 17 * 37 + 5 * 18
