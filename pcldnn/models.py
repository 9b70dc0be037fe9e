"""The three networks of Das et al. 2016, each with the source of its geometry."""

from __future__ import annotations

from pcldnn.layers import Conv2d, Dropout, Flatten, Linear, MaxPool2d, ReLU, Sigmoid
from pcldnn.network import Network

VGG_A = (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool")


def vgg_a(num_classes: int = 1000, input_shape=(3, 224, 224), dropout: float = 0.5, seed: int = 0) -> Network:
    """VGG-A: configuration A of Simonyan and Zisserman 2015, without normalisation; torchvision's `vgg11`.

    Parameters
    ----------
    num_classes : int
    input_shape : (channels, height, width)
        From 32x32. The classifier takes whatever map five poolings leave; at 224x224 weights and their names are
        those of torchvision. (torchvision resamples other sizes to 7x7 before its classifier; this network does not.)
    dropout : float
        Probability, after the first two fully connected layers.
    seed : int
    """
    channels, height, width = input_shape
    layers = []
    for entry in VGG_A:
        if entry == "pool":
            layers.append(MaxPool2d(2))
            height, width = height // 2, width // 2
        else:
            layers += [Conv2d(channels, entry, 3, padding=1), ReLU()]
            channels = entry
    # An image that is too small is refused by the pooling layer where it vanishes; 1 lets us get that far.
    layers += _classifier(channels * max(height, 1) * max(width, 1), (4096, 4096), num_classes, dropout)
    return Network(layers, input_shape, seed=seed)


def overfeat_fast(num_classes: int = 1000, input_shape=(3, 231, 231), dropout: float = 0.5, seed: int = 0) -> Network:
    """OverFeat-FAST: Sermanet et al. 2014, in the geometry of convnet-benchmarks (caffe/imagenet_winners/overfeat).

    Which variant Das et al. 2016 used exactly is not known. Parameters as for `vgg_a`; images from 71x71.
    """
    channels, height, width = input_shape
    features = [
        Conv2d(channels, 96, 11, stride=4), ReLU(), MaxPool2d(2),
        Conv2d(96, 256, 5), ReLU(), MaxPool2d(2),
        Conv2d(256, 512, 3, padding=1), ReLU(),
        Conv2d(512, 1024, 3, padding=1), ReLU(),
        Conv2d(1024, 1024, 3, padding=1), ReLU(), MaxPool2d(2),
    ]  # fmt: skip
    rows, columns = ((((size - 11) // 4 + 1) // 2 - 4) // 2 // 2 for size in (height, width))
    classifier = _classifier(1024 * max(rows, 1) * max(columns, 1), (3072, 4096), num_classes, dropout)
    return Network(features + classifier, input_shape, seed=seed)


def cd_dnn(input: int = 429, hidden=(2048,) * 7, classes: int = 9304, seed: int = 0) -> Network:
    """CD-DNN: context window of speech features to scores of tied triphone states, sigmoid units.

    The default is the Switchboard network of Seide et al. 2014 (11 frames of 39 features, 9304 states), the best
    candidate for the 7-layer DNN of Das et al. 2016, whose sizes are not known. Layers are called fc1, sigmoid1, ...

    Parameters
    ----------
    input : int
        Features of a frame with its context.
    hidden : sequence of int
        Widths of the hidden layers.
    classes : int
    seed : int
    """
    layers, width = [], input
    for i, units in enumerate(hidden, 1):
        layers += [(f"fc{i}", Linear(width, units)), (f"sigmoid{i}", Sigmoid())]
        width = units
    return Network([*layers, (f"fc{len(hidden) + 1}", Linear(width, classes))], (input,), seed=seed)


def _classifier(features: int, hidden: tuple[int, ...], num_classes: int, dropout: float) -> list:
    """Flatten, fully connected layers with ReLU and dropout, scores."""
    layers = [Flatten()]
    for units in hidden:
        layers += [Linear(features, units), ReLU(), Dropout(dropout)]
        features = units
    return [*layers, Linear(features, num_classes)]


NETWORKS = {"vgg_a": vgg_a, "overfeat_fast": overfeat_fast, "cd_dnn": cd_dnn}
