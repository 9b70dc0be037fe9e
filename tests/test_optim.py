"""SGD on owned shards, and its schedules."""

import json

import numpy as np
import pytest

from pcldnn import SGD, Constant, Network, PolynomialDecay, StepDecay
from pcldnn.layers import Conv2d, Flatten, Linear, ReLU
from pcldnn.optim import schedule_from_description

LAYERS = [Conv2d(2, 6, 3), ReLU(), Flatten(), Linear(24, 3)]


def trained(optimizer, steps=3):
    network = Network(LAYERS, (2, 4, 4))
    network.prepare(4)
    for i in range(steps):
        random = np.random.default_rng(i)
        network.forward_loss(random.standard_normal((4, 2, 4, 4)).astype(np.float32), random.integers(0, 3, 4))
        network.backward()
        network.update(optimizer, epoch=i / 2)
    return network


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.0), (0.9, 0.01), (0.0, 0.1)])
def test_rule_is_pytorchs(target, momentum, decay):
    """g += wd w; v = mu v + g; w -= lr v, in float64 beside."""
    random = np.random.default_rng(0)
    weights = random.standard_normal(40).astype(np.float32)
    w, v = weights.astype(np.float64), np.zeros(40)
    optimizer = SGD(StepDecay(0.1, every=2), momentum, decay)
    for i in range(5):
        gradients = random.standard_normal(40).astype(np.float32)
        v = momentum * v + gradients + decay * w
        w -= 0.1 * 0.1 ** (i // 2) * v
        optimizer.update("layer", weights, gradients, epoch=i)
    np.testing.assert_allclose(weights, w, rtol=1e-5, atol=1e-6)


def test_empty_shard(target):
    optimizer = SGD(0.1, 0.9)
    optimizer.update("layer", np.empty(0, np.float32), np.empty(0, np.float32), 0.0)


def test_schedules():
    assert [StepDecay(1.0, every=10)(e) for e in (0, 9.99, 10, 25)] == pytest.approx([1, 1, 0.1, 0.01])
    assert [PolynomialDecay(2.0, epochs=10, power=2)(e) for e in (0, 5, 10, 11)] == [2, 0.5, 0, 0]
    assert Constant(0.3)(99) == 0.3
    for schedule in (Constant(0.3), StepDecay(1.0, 10, 0.5), PolynomialDecay(2.0, 10)):
        assert schedule_from_description(json.loads(json.dumps(schedule.description()))) == schedule
        assert SGD(schedule).lr(3.0) == schedule(3.0)
    assert SGD(0.1).schedule == Constant(0.1)
    warm = PolynomialDecay(2.0, 10, warmup=2.0)
    assert [warm(e) for e in (0, 1, 2, 5)] == pytest.approx([0.2, 2.0 * 0.55 * 0.9, 1.6, 1.0])
    assert schedule_from_description(json.loads(json.dumps(warm.description()))) == warm
    assert json.dumps(SGD(0.1, 0.9).description())


def test_momentum_is_saved_in_logical_order():
    optimizer = SGD(0.1, momentum=0.9)
    assert optimizer.state_dict(Network(LAYERS, (2, 4, 4))) == {}
    network = trained(optimizer)
    state = optimizer.state_dict(network)
    assert {name: value.shape for name, value in state.items()} == {
        f"momentum.{name}": value.shape for name, value in network.state_dict().items()
    }
    other = SGD(0.1, momentum=0.9)
    other.load_state_dict(state, network)
    assert all(np.array_equal(other._shards[name], shard) for name, shard in optimizer._shards.items())
    assert SGD(0.1).state_dict(network) == {}
    other.load_state_dict({}, network)
    assert other.state_dict(network) == {}


def test_resumed_is_uninterrupted():
    straight, first = SGD(0.1, 0.9, 0.01), SGD(0.1, 0.9, 0.01)
    wanted, half = trained(straight, 3), trained(first, 2)
    resumed, second = Network(LAYERS, (2, 4, 4)), SGD(0.1, 0.9, 0.01)
    resumed.prepare(4)
    resumed.load_state_dict(half.state_dict())
    second.load_state_dict(first.state_dict(half), resumed)
    random = np.random.default_rng(2)
    resumed.forward_loss(random.standard_normal((4, 2, 4, 4)).astype(np.float32), random.integers(0, 3, 4))
    resumed.backward()
    resumed.update(second, epoch=1.0)
    assert all(np.array_equal(value, resumed.state_dict()[name]) for name, value in wanted.state_dict().items())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(-0.1), "lr: got -0.1"),
        (lambda: SGD(0.1, momentum=1.0), "momentum: got 1.0"),
        (lambda: SGD(0.1, weight_decay=-1), "weight_decay: got -1"),
        (lambda: StepDecay(0.1, every=0), "every: got 0"),
        (lambda: PolynomialDecay(0.1, epochs=0), "epochs: got 0"),
        (lambda: schedule_from_description({"kind": "Magic"}), "got kind 'Magic'"),
        (lambda: SGD(0.1).load_state_dict({"weight": 0}, None), "names that begin with 'momentum.'"),
    ],
)
def test_mistakes_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_shards_of_another_partition_are_refused():
    optimizer = SGD(0.1, 0.9)
    optimizer.update("fc", np.zeros(8, np.float32), np.zeros(8, np.float32), 0.0)
    with pytest.raises(ValueError, match="layer fc: .* shard of 8 weights, got one of 16"):
        optimizer.update("fc", np.zeros(16, np.float32), np.zeros(16, np.float32), 0.0)
