"""The tables that tests run over.

Who adds a layer adds a row to LAYERS; who finds a shape that breaks adds it too. The kernels have tables of
their own: they take any shape, whether or not a layer would.
"""

from typing import NamedTuple

from pcldnn.layers import AvgPool2d, Conv2d, Dropout, Flatten, Linear, MaxPool2d, ReLU, Sigmoid, Tanh

# Every layer, each with an input shape of one image, (C, H, W) or (F,): small, and awkward on purpose.
LAYERS = [
    (Conv2d(3, 5, 3, padding=1), (3, 6, 5)),
    (Conv2d(9, 3, 5, stride=3, padding=1), (9, 10, 11)),
    (Conv2d(17, 10, (1, 2), stride=(2, 1), bias=False), (17, 4, 4)),
    (Conv2d(3, 5, 3, stride=2, padding=1), (3, 2, 2)),
    (Conv2d(3, 5, 7, stride=2, padding=3), (3, 1, 9)),
    (Conv2d(2, 3, 3, padding=4), (2, 11, 14)),
    (Conv2d(1, 1, 11, stride=4), (1, 23, 15)),
    (Linear(13, 7), (13,)),
    (Linear(33, 1, bias=False), (33,)),
    (MaxPool2d(2), (5, 6, 4)),
    (MaxPool2d(3, 2, padding=1, ceil_mode=True), (9, 7, 8)),
    (AvgPool2d(2), (5, 7, 4)),
    (AvgPool2d((3, 2), 2, padding=1, ceil_mode=True), (9, 7, 8)),
    (AvgPool2d(3, 2, padding=1, count_include_pad=False), (3, 6, 6)),
    (ReLU(), (5, 3, 2)),
    (ReLU(), (11,)),
    (Sigmoid(), (5, 3, 2)),
    (Tanh(), (9, 3, 2)),
    (Dropout(0.3), (5, 3, 2)),
    (Flatten(), (5, 3, 2)),
]


class Convolution(NamedTuple):
    """A convolution on n images: C channels of H x W to K channels, filter R x S."""

    name: str
    n: int
    channels: int
    size: tuple
    filters: int
    kernel: tuple
    stride: tuple = (1, 1)
    padding: tuple = (0, 0)

    @property
    def output(self):
        """Height and width of the output."""
        parts = zip(self.size, self.kernel, self.stride, self.padding, strict=True)
        return tuple((size + 2 * padding - kernel) // stride + 1 for size, kernel, stride, padding in parts)


# Every convolution of the two networks, one or two images; where the whole layer would take long, fewer rows of
# the full width and, of thousands of filters, a part. (conv8 of VGG-A has the shape of conv7.)
NETWORK_CONVOLUTIONS = [
    Convolution("vgg_a-conv1", 1, 3, (9, 224), 64, (3, 3), padding=(1, 1)),
    Convolution("vgg_a-conv2", 1, 64, (6, 112), 128, (3, 3), padding=(1, 1)),
    Convolution("vgg_a-conv3", 1, 128, (6, 56), 256, (3, 3), padding=(1, 1)),
    Convolution("vgg_a-conv4", 1, 256, (5, 56), 256, (3, 3), padding=(1, 1)),
    Convolution("vgg_a-conv5", 1, 256, (6, 28), 512, (3, 3), padding=(1, 1)),
    Convolution("vgg_a-conv6", 1, 512, (4, 28), 512, (3, 3), padding=(1, 1)),
    Convolution("vgg_a-conv7", 2, 512, (5, 14), 512, (3, 3), padding=(1, 1)),
    Convolution("overfeat_fast-conv1", 1, 3, (23, 231), 96, (11, 11), (4, 4)),
    Convolution("overfeat_fast-conv2", 1, 96, (9, 28), 256, (5, 5)),
    Convolution("overfeat_fast-conv3", 1, 256, (6, 12), 512, (3, 3), padding=(1, 1)),
    Convolution("overfeat_fast-conv4-part", 1, 512, (4, 12), 256, (3, 3), padding=(1, 1)),
    Convolution("overfeat_fast-conv5-part", 1, 1024, (3, 12), 128, (3, 3), padding=(1, 1)),
]

# Awkward ones: narrow and wide, odd counts, filters 1 to 11, strides 1 to 4, padding up to and beyond the
# filter, 1x1 images. All values of C and K from 1 to 33 are in test_a2.
AWKWARD_CONVOLUTIONS = [
    Convolution("one-of-everything", 1, 1, (1, 1), 1, (1, 1)),
    Convolution("1x1-image", 3, 5, (1, 1), 7, (3, 3), padding=(1, 1)),
    Convolution("1x1-filter", 2, 17, (5, 7), 33, (1, 1)),
    Convolution("1x1-filter-stride", 2, 9, (7, 8), 9, (1, 1), (2, 3)),
    Convolution("2x2-images", 7, 16, (2, 2), 24, (3, 3), padding=(1, 1)),
    Convolution("2x2-filter", 2, 4, (5, 6), 8, (2, 2)),
    Convolution("4x4-filter", 1, 3, (9, 9), 5, (4, 4), (2, 2), (1, 2)),
    Convolution("5x5-stride", 1, 9, (32, 32), 3, (5, 5), (3, 3), (1, 1)),
    Convolution("6x6-filter", 1, 2, (11, 8), 2, (6, 6), (3, 1), (0, 3)),
    Convolution("7x7-stride", 2, 3, (19, 22), 10, (7, 7), (2, 2), (3, 3)),
    Convolution("8x9-filter", 1, 6, (10, 13), 3, (8, 9), (1, 4), (2, 0)),
    Convolution("10x10-filter", 1, 1, (13, 12), 4, (10, 10), padding=(1, 0)),
    Convolution("11x11-stride", 1, 4, (27, 35), 6, (11, 11), (4, 4)),
    Convolution("row-filter", 2, 8, (4, 13), 16, (1, 5), padding=(0, 2)),
    Convolution("column-filter", 2, 11, (13, 4), 12, (7, 1), (2, 1), (3, 0)),
    Convolution("gaps-between-windows", 1, 8, (13, 14), 8, (2, 2), (4, 3)),
    Convolution("unused-border", 1, 5, (12, 11), 4, (3, 3), (4, 4)),
    Convolution("padding-as-filter", 1, 1, (1, 1), 1, (3, 3), padding=(3, 3)),
    Convolution("padding-beyond-filter", 2, 2, (11, 14), 3, (3, 3), padding=(4, 4)),
    Convolution("padding-far-beyond", 1, 10, (3, 2), 9, (2, 3), (3, 2), (7, 9)),
    Convolution("wide-row", 1, 4, (2, 301), 12, (3, 3), padding=(1, 1)),
    Convolution("tall-column", 1, 4, (301, 2), 12, (3, 3), padding=(1, 1)),
    Convolution("many-channels", 1, 131, (4, 5), 67, (3, 3), padding=(1, 1)),
    Convolution("many-images", 33, 8, (3, 3), 8, (3, 3)),
    Convolution("no-image", 0, 12, (6, 5), 20, (3, 3), padding=(1, 1)),
]


class FullyConnected(NamedTuple):
    """A fully connected layer on n samples of F features."""

    name: str
    n: int
    features: int
    outputs: int


# The layers of the networks with all their features, but few samples and, of thousands of outputs, a part.
LINEARS = [
    FullyConnected("vgg_a-fc6-part", 3, 25088, 64),
    FullyConnected("vgg_a-fc7-part", 2, 4096, 256),
    FullyConnected("vgg_a-fc8", 5, 4096, 1000),
    FullyConnected("overfeat_fast-fc6-part", 2, 36864, 64),
    FullyConnected("overfeat_fast-fc7-part", 4, 3072, 256),
    FullyConnected("cd_dnn-first", 64, 429, 2048),
    FullyConnected("cd_dnn-hidden-part", 130, 2048, 256),
    FullyConnected("cd_dnn-last-part", 9, 2048, 1163),
    FullyConnected("one", 1, 1, 1),
    FullyConnected("one-output", 33, 57, 1),
    FullyConnected("one-feature", 5, 1, 19),
    FullyConnected("thread-count", 1, 56, 444),
    FullyConnected("more-samples", 257, 31, 33),
    FullyConnected("long-sum", 3, 10007, 3),
    FullyConnected("odd", 13, 517, 91),
    FullyConnected("no-sample", 0, 24, 10),
]


class Pooling(NamedTuple):
    """A pooling layer on n images of C channels; `ceil`: which of the two rules gives the output size."""

    name: str
    n: int
    channels: int
    size: tuple
    kernel: tuple
    stride: tuple
    padding: tuple = (0, 0)
    ceil: bool = False

    @property
    def output(self):
        """Height and width of the output, the rule of PyTorch."""
        return tuple(map(self._along, self.size, self.kernel, self.stride, self.padding))

    def _along(self, size, kernel, stride, padding):
        room = size + 2 * padding - kernel
        count = (-(-room // stride) if self.ceil else room // stride) + 1
        return count - (self.ceil and (count - 1) * stride >= size + padding)


# Every pooling layer of the two networks, whole images of fewer channels, and awkward ones.
POOLINGS = [
    Pooling("vgg_a-pool1", 1, 16, (224, 224), (2, 2), (2, 2)),
    Pooling("vgg_a-pool2", 1, 32, (112, 112), (2, 2), (2, 2)),
    Pooling("vgg_a-pool3", 1, 32, (56, 56), (2, 2), (2, 2)),
    Pooling("vgg_a-pool4", 2, 32, (28, 28), (2, 2), (2, 2)),
    Pooling("vgg_a-pool5", 2, 32, (14, 14), (2, 2), (2, 2)),
    Pooling("overfeat_fast-pool1", 1, 32, (56, 56), (2, 2), (2, 2)),
    Pooling("overfeat_fast-pool2", 2, 32, (24, 24), (2, 2), (2, 2)),
    Pooling("overfeat_fast-pool5", 2, 64, (12, 12), (2, 2), (2, 2)),
    Pooling("floor", 1, 8, (112, 112), (3, 3), (2, 2)),
    Pooling("ceil", 1, 8, (112, 112), (3, 3), (2, 2), ceil=True),
    Pooling("identity", 1, 3, (4, 5), (1, 1), (1, 1)),
    Pooling("1x1-image", 2, 9, (1, 1), (1, 1), (2, 2)),
    Pooling("odd", 2, 5, (7, 9), (2, 2), (2, 2)),
    Pooling("odd-ceil", 2, 5, (7, 9), (2, 2), (2, 2), ceil=True),
    Pooling("overlapping", 2, 17, (9, 8), (3, 3), (1, 1), (1, 1)),
    Pooling("overlapping-wide", 1, 17, (20, 100), (5, 3), (1, 2), (2, 1)),
    Pooling("gaps", 1, 4, (11, 13), (2, 2), (3, 4)),
    Pooling("gaps-unlike", 1, 4, (11, 13), (2, 2), (2, 3)),
    Pooling("rectangular", 2, 10, (8, 11), (3, 2), (2, 1), (1, 0)),
    Pooling("rectangular-ceil", 2, 10, (8, 11), (2, 5), (3, 2), (1, 2), ceil=True),
    Pooling("padded-ceil", 1, 8, (6, 7), (3, 3), (2, 2), (1, 1), ceil=True),
    Pooling("large", 1, 8, (13, 12), (7, 6), (5, 3), (3, 3)),
    Pooling("whole-image", 3, 33, (6, 7), (6, 7), (1, 1)),
    Pooling("no-image", 0, 8, (6, 7), (2, 2), (2, 2)),
]
