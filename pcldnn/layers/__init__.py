"""The layers a network is described with. A family a file; `base.py` says how to add one."""

from pcldnn.layers.activation import ReLU, Sigmoid, Tanh
from pcldnn.layers.base import Layer
from pcldnn.layers.conv import Conv2d
from pcldnn.layers.dropout import Dropout
from pcldnn.layers.flatten import Flatten
from pcldnn.layers.linear import Linear
from pcldnn.layers.loss import CrossEntropyLoss
from pcldnn.layers.pool import AvgPool2d, MaxPool2d

__all__ = [
    "AvgPool2d",
    "Conv2d",
    "CrossEntropyLoss",
    "Dropout",
    "Flatten",
    "Layer",
    "Linear",
    "MaxPool2d",
    "ReLU",
    "Sigmoid",
    "Tanh",
]
