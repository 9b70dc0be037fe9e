"""The three networks: geometry, names, and that they train."""

import numpy as np
import pytest

from pcldnn import SGD, Partition, _kernels, models

VGG11 = {  # torchvision.models.vgg11().state_dict(), weights only
    "features.0": (64, 3, 3, 3),
    "features.3": (128, 64, 3, 3),
    "features.6": (256, 128, 3, 3),
    "features.8": (256, 256, 3, 3),
    "features.11": (512, 256, 3, 3),
    "features.13": (512, 512, 3, 3),
    "features.16": (512, 512, 3, 3),
    "features.18": (512, 512, 3, 3),
    "classifier.0": (4096, 25088),
    "classifier.3": (4096, 4096),
    "classifier.6": (1000, 4096),
}


def shapes(network):
    return {
        f"{layer.name}.{parameter.name}": parameter.shape
        for layer in network.plan(1).layers
        for parameter in layer.parameters
    }


def test_vgg_a_is_torchvisions_vgg11():
    wanted = {f"{name}.weight": shape for name, shape in VGG11.items()}
    wanted |= {f"{name}.bias": shape[:1] for name, shape in VGG11.items()}
    assert shapes(models.vgg_a()) == wanted


@pytest.mark.parametrize(
    ("shape", "features"), [((1, 32, 32), 512), ((3, 32, 32), 512), ((3, 64, 48), 1024), ((3, 63, 95), 1024)]
)
def test_vgg_a_takes_small_images(shape, features):
    network = models.vgg_a(10, shape)
    assert shapes(network)["classifier.0.weight"] == (4096, features)
    assert shapes(network)["features.0.weight"] == (64, shape[0], 3, 3)
    assert network.num_classes == 10


def test_overfeat_fast():
    network = models.overfeat_fast()
    assert [shape for name, shape in shapes(network).items() if name.endswith("weight")] == [
        (96, 3, 11, 11), (256, 96, 5, 5), (512, 256, 3, 3), (1024, 512, 3, 3), (1024, 1024, 3, 3),
        (3072, 36864), (4096, 3072), (1000, 4096),
    ]  # fmt: skip
    assert shapes(models.overfeat_fast(10, (1, 71, 71)))["classifier.0.weight"] == (3072, 1024)


def test_cd_dnn():
    network = models.cd_dnn()
    weights = [shape for name, shape in shapes(network).items() if name.endswith("weight")]
    assert weights == [(2048, 429), *[(2048, 2048)] * 6, (9304, 2048)]


def test_layers_of_cd_dnn_have_the_names_that_partitions_have():
    """Names are printed, --partition takes nicknames: here they are the same."""
    network = models.cd_dnn(12, (16, 16), 5)
    named = {"fc1": Partition(1, 2), "fc2": Partition(2, 1), "fc3": Partition(1, 2)}
    grids = {layer.name: layer.partition for layer in network.plan(4, ranks=2, partitions=named).layers}
    assert {name: grids[name] for name in named} == named
    assert network.names == ("fc1", "sigmoid1", "fc2", "sigmoid2", "fc3")


@pytest.mark.parametrize("build", [models.vgg_a, models.overfeat_fast])
def test_images_that_are_too_small_are_refused(build):
    """A6."""
    with pytest.raises(ValueError, match=r"layer features\.\d+, (MaxPool2d|Conv2d).* smaller than the kernel"):
        build(10, (3, 31, 31))


def test_cd_dnn_trains():
    """Seven layers of sigmoids from their starting values: the loss must fall, and signals reach the first layer."""
    network = models.cd_dnn(20, (64,) * 7, 8)
    network.prepare(64)
    random = np.random.default_rng(0)
    centres = random.standard_normal((8, 20))
    labels = random.integers(0, 8, 64)
    frames = (centres[labels] + 0.3 * random.standard_normal((64, 20))).astype(np.float32)
    optimizer, losses = SGD(0.2, momentum=0.9), []
    for _ in range(60):
        losses.append(network.forward_loss(frames, labels)[0] / 64)
        network.backward()
        network.update(optimizer)
    assert losses[0] < 3 * np.log(8)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.skipif(_kernels.TARGET == "reference", reason="half a minute with the NumPy twins")
def test_vgg_a_starts_well():
    """At 32x32: scores near zero, gradients in every layer, and the first steps of plain SGD do not blow up."""
    network = models.vgg_a(10, (1, 32, 32), dropout=0.0)
    network.prepare(2)
    images = np.random.default_rng(0).standard_normal((2, 1, 32, 32)).astype(np.float32)
    optimizer = SGD(0.01, momentum=0.9)
    for i in range(2):
        loss, logits = network.forward_loss(images, [0, 1])
        assert loss / 2 < 1.2 * np.log(10)
        assert np.abs(logits).max() < 1 or i > 0
        network.backward()
        weights = network.state_dict()
        for name, gradient in network.gradients().items():
            if name.endswith("weight") and name != "classifier.6.weight":  # that one is small on purpose
                assert 1e-5 < np.linalg.norm(gradient) / np.linalg.norm(weights[name]) < 10, name
        network.update(optimizer)
