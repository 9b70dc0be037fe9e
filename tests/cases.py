"""The tables that tests run over. Who adds a layer adds a row to LAYERS; who finds a shape that breaks adds it too."""

from pcldnn.layers import AvgPool2d, Conv2d, Dropout, Flatten, Linear, MaxPool2d, ReLU, Sigmoid, Tanh

# Every layer, each with an input shape of one image, (C, H, W) or (F,): small, and awkward on purpose.
LAYERS = [
    (Conv2d(3, 5, 3, padding=1), (3, 6, 5)),
    (Conv2d(9, 3, 5, stride=3, padding=1), (9, 10, 11)),
    (Conv2d(17, 10, (1, 2), stride=(2, 1), bias=False), (17, 4, 4)),
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
