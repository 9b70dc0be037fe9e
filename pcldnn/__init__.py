"""pcldnn: synchronous SGD for deep networks on clusters of CPUs.

Describe (layers, `Network`), plan (`Network.plan`), run (`Trainer`). The names below are loaded when they are first
used, so that `import pcldnn` is quick and starts neither MPI nor kernels.
"""

import importlib

__version__ = "0.1.0"

_HOMES = {
    "pcldnn.communicator": ("Communicator", "SerialCommunicator"),
    "pcldnn.layers": (
        "AvgPool2d",
        "Conv2d",
        "CrossEntropyLoss",
        "Dropout",
        "Flatten",
        "Linear",
        "MaxPool2d",
        "ReLU",
        "Sigmoid",
        "Tanh",
    ),
    "pcldnn.network": ("Network",),
    "pcldnn.optim": ("SGD", "Constant", "PolynomialDecay", "StepDecay"),
    "pcldnn.partition": ("Partition",),
    "pcldnn.train": ("Trainer",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_SUBMODULES = ("checkpoint", "communicator", "data", "layers", "machine", "models", "optim", "scaling", "train")

__all__ = sorted(_HOME_OF)  # noqa: PLE0605 (made from the table)


def __getattr__(name):
    """Load a public name from the module it lives in."""
    if name in _SUBMODULES:
        return importlib.import_module(f"pcldnn.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'pcldnn' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOME_OF[name]), name)
    return value


def __dir__():
    return sorted({*globals(), *_HOME_OF, *_SUBMODULES})
