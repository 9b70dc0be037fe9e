"""Starting values of weights: by the layers around them, and such that signals keep their size."""

import numpy as np
import pytest
from small_network import batch

from pcldnn import Network
from pcldnn.layers import Conv2d, Dropout, Flatten, Linear, ReLU, Sigmoid


def test_starting_values():
    """By the activation behind and the dropout in front; drawn from the seed and the layer only."""
    layers = [Conv2d(16, 64, 3), ReLU(), Flatten(), Dropout(0.75), Linear(1024, 500), Sigmoid(), Linear(500, 400)]
    values = Network(layers, (16, 6, 6)).state_dict()
    spread = {name: value.std() for name, value in values.items()}
    assert spread["features.0.weight"] == pytest.approx(np.sqrt(2 / 144), rel=0.03)
    assert spread["classifier.1.weight"] == pytest.approx(4 * np.sqrt(2 / 1524) / 2, rel=0.03)
    assert spread["classifier.3.weight"] == pytest.approx(0.1 * np.sqrt(2 / 900), rel=0.03)
    assert not any(value.any() for name, value in values.items() if name.endswith("bias"))
    again, other = Network(layers, (16, 6, 6), seed=0).state_dict(), Network(layers, (16, 6, 6), seed=1).state_dict()
    assert all(np.array_equal(values[name], again[name]) for name in values)
    assert not np.array_equal(values["features.0.weight"], other["features.0.weight"])


def test_signals_survive_a_deep_network(target):
    """20 convolutions with ReLU, no normalisation: activations and gradients keep their size to the ends."""
    layers = [Conv2d(3, 16, 3, padding=1), ReLU()]
    for _ in range(19):
        layers += [Conv2d(16, 16, 3, padding=1), ReLU()]
    network = Network([*layers, Flatten(), Linear(16 * 64, 10)], (3, 8, 8))
    network.prepare(8)
    network.forward_loss(*batch(8, (3, 8, 8), 10))
    units = network._passes.units
    first, last = (np.sqrt(np.mean(np.square(unit.y))) for unit in (units[0], units[19]))
    assert 0.1 < first / last < 10
    network.backward()
    gradients = network.gradients()
    first, last = (np.abs(gradients[f"features.{i}.weight"]).mean() for i in (0, 38))
    assert 0.02 < first / last < 50
