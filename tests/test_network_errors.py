"""Network: what goes wrong is named, by layer or by argument."""

import numpy as np
import pytest
from small_network import SHAPE, SMALL, batch

from pcldnn import SGD, Network
from pcldnn.layers import AvgPool2d, Conv2d


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_nonfinite_is_named(target):
    network = Network(SMALL, SHAPE)
    network.prepare(5)
    images, labels = batch()
    network.forward_loss(images, labels)
    assert network.find_nonfinite() is None
    network.backward()
    assert network.find_nonfinite() is None
    clean = network.state_dict()
    spoiled = {name: value.copy() for name, value in clean.items()}
    spoiled["features.3.bias"][4] = np.nan
    network.load_state_dict(spoiled)
    loss, _ = network.forward_loss(images, labels)
    assert not np.isfinite(loss)
    assert network.find_nonfinite() == "features.3"
    network.load_state_dict({**clean, "classifier.3.weight": np.full((5, 17), 3e38, np.float32)})
    network.forward_loss(images, labels)
    assert network.find_nonfinite() == "classifier.3"
    network.load_state_dict(clean)
    images[2, 0, 0, 0] = np.inf
    network.forward_loss(images, labels)
    assert network.find_nonfinite() == "input"


def test_labels_are_checked(target):
    """A11."""
    network = Network(SMALL, SHAPE)
    network.prepare(5)
    images, labels = batch()
    for wrong in (5, -1, 1000):
        labels[3] = wrong
        with pytest.raises(ValueError, match=rf"labels\[3\] is {wrong}.*5 classes"):
            network.forward_loss(images, labels)
        with pytest.raises(ValueError, match="call forward_loss first"):
            network.backward()


def test_errors_in_a_pass_name_the_layer(monkeypatch):
    def broken(*arguments):
        raise RuntimeError("as if a kernel failed")

    network = Network(SMALL, SHAPE)
    network.prepare(5)
    monkeypatch.setattr(AvgPool2d, "compute_forward", broken)
    with pytest.raises(RuntimeError) as caught:
        network.forward(batch()[0])
    assert caught.value.__notes__[0].startswith("in forward of layer features.6, AvgPool2d")


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda n, x, y: n.forward_loss(x, y), r"forward_loss: call prepare"),
        (lambda n, x, y: n.backward(), "call forward_loss first"),
        (lambda n, x, y: n.update(SGD(0.1)), "call prepare"),
        (lambda n, x, y: n.find_nonfinite(), "call forward_loss first"),
        (lambda n, x, y: n.forward(x[:, :2]), r"images: got shape \(5, 2, 6, 7\), wanted \(any, 3, 6, 7\)"),
        (lambda n, x, y: n.forward(x.astype(float)), "images: got dtype float64"),
        (lambda n, x, y: n.initialize(-1), "seed: got -1"),
        (lambda n, x, y: n.load_state_dict({}), r"missing \['classifier.0.bias'"),
        (lambda n, x, y: n.load_state_dict({**n.state_dict(), "extra": y}), r"not in this network \['extra'\]"),
        (
            lambda n, x, y: n.load_state_dict({**n.state_dict(), "features.0.weight": x}),
            r"features\.0\.weight: got shape .* wanted \(10, 3, 3, 3\)",
        ),
    ],
)
def test_mistakes_are_named(action, message):
    with pytest.raises(ValueError, match=message):
        action(Network(SMALL, SHAPE), *batch())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": [0]}, "labels: got shape"),
        ({"labels": [0.0] * 5}, "labels: got dtype"),
        ({"sample_ids": [1, 2]}, "sample_ids: got shape"),
        ({"global_count": 4}, "got 5 in a step of global_count 4"),
        ({"images": np.zeros((6, *SHAPE), np.float32), "labels": [0] * 6}, "got 6 in a step .* wanted at most 5"),
    ],
)
def test_mistakes_in_a_step_are_named(options, message):
    network = Network(SMALL, SHAPE)
    network.prepare(5)
    images, labels = batch()
    with pytest.raises(ValueError, match=message):
        network.forward_loss(**{"images": images, "labels": labels, **options})


def test_training_wants_class_scores():
    with pytest.raises(ValueError, match=r"ends with images of shape \(6, 4, 5\): put Flatten"):
        Network([Conv2d(3, 6, 3)], SHAPE).prepare(2)
    with pytest.raises(ValueError, match="call prepare"):
        network = Network(SMALL, SHAPE)
        network.prepare(2, training=False)
        network.forward_loss(*batch(2))
