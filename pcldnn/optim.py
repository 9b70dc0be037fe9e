"""Stochastic gradient descent with momentum, and schedules of its learning rate.

Plain synchronous SGD, PyTorch's rule: g += weight_decay * w; v = momentum * v + g; w -= lr * v. A rank updates only
the shard of each layer that it owns, and momentum exists only there (owner-computes, Das et al. 2016).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from math import floor

import numpy as np

from pcldnn import _kernels as kernels
from pcldnn.layout import aligned_zeros


@dataclass(frozen=True)
class Schedule:
    """A learning rate that depends on how far training is: `epoch` is fractional, steps / steps of an epoch.

    With `warmup` it rises linearly from a tenth to the whole within so many epochs: the gradients of the first steps
    are large and all alike, and a plain deep network does not survive big steps along them.
    """

    lr: float
    warmup: float = field(default=0.0, kw_only=True)

    def __call__(self, epoch: float) -> float:
        """Learning rate at `epoch`."""
        warmth = 1.0 if epoch >= self.warmup else 0.1 + 0.9 * epoch / self.warmup
        return warmth * self.decayed(epoch)

    def decayed(self, epoch: float) -> float:
        """The rate without the warm-up."""
        raise NotImplementedError

    def __post_init__(self):
        for name in ("lr", "warmup"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: got {getattr(self, name)}, wanted at least 0")

    def description(self) -> dict:
        """For a checkpoint: numbers and strings only; `schedule_from_description` is the inverse."""
        return {"kind": type(self).__name__, **asdict(self)}


@dataclass(frozen=True)
class Constant(Schedule):
    """Always `lr`."""

    def decayed(self, epoch):
        return self.lr


@dataclass(frozen=True)
class StepDecay(Schedule):
    """Times `factor` after each `every` epochs."""

    every: float
    factor: float = 0.1

    def __post_init__(self):
        super().__post_init__()
        if self.every <= 0:
            raise ValueError(f"StepDecay every: got {self.every}, wanted more than 0 epochs")

    def decayed(self, epoch):
        return self.lr * self.factor ** floor(epoch / self.every)


@dataclass(frozen=True)
class PolynomialDecay(Schedule):
    """lr * (1 - epoch/epochs)**power: from `lr` to 0 in `epochs` epochs."""

    epochs: float
    power: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        if self.epochs <= 0:
            raise ValueError(f"PolynomialDecay epochs: got {self.epochs}, wanted more than 0")

    def decayed(self, epoch):
        return self.lr * max(0.0, 1 - epoch / self.epochs) ** self.power


SCHEDULES = {kind.__name__: kind for kind in (Constant, StepDecay, PolynomialDecay)}


def schedule_from_description(description: dict) -> Schedule:
    """The schedule that `Schedule.description` describes."""
    arguments = dict(description)
    kind = arguments.pop("kind", None)
    if kind not in SCHEDULES:
        raise ValueError(f"schedule: got kind {kind!r}, wanted one of {', '.join(SCHEDULES)}")
    return SCHEDULES[kind](**arguments)


class SGD:
    """Stochastic gradient descent.

    Parameters
    ----------
    lr : float or Schedule
    momentum : float
    weight_decay : float
        Of weights and biases alike, as in PyTorch.
    """

    def __init__(self, lr: float | Schedule, momentum: float = 0.0, weight_decay: float = 0.0):
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum: got {momentum}, wanted 0 <= momentum < 1")
        if weight_decay < 0:
            raise ValueError(f"weight_decay: got {weight_decay}, wanted at least 0")
        self.schedule = lr if isinstance(lr, Schedule) else Constant(float(lr))
        self.momentum = momentum
        self.weight_decay = weight_decay
        self._shards: dict[str, np.ndarray] = {}  # momentum of the owned shard of each layer

    def __repr__(self) -> str:
        return f"SGD({self.schedule}, momentum={self.momentum}, weight_decay={self.weight_decay})"

    def lr(self, epoch: float) -> float:
        """Learning rate at a point of the training."""
        return self.schedule(epoch)

    def update(
        self, layer: str, weights: np.ndarray, gradients: np.ndarray, epoch: float, num_threads: int = 1
    ) -> None:
        """One step of one layer's owned shard: flat float32 arrays, `weights` changes in place."""
        velocity = self._shards.get(layer)
        if velocity is None:
            velocity = self._shards[layer] = aligned_zeros(weights.size)
        if velocity.size != weights.size:
            raise ValueError(
                f"layer {layer}: this optimizer holds momentum for a shard of {velocity.size} weights, got one of "
                f"{weights.size}; go to another number of ranks through state_dict and load_state_dict"
            )
        kernels.sgd_update(
            weights, gradients, velocity, self.lr(epoch), self.momentum, self.weight_decay, num_threads
        )

    @property
    def has_state(self) -> bool:
        """Whether there is momentum to keep: none before the first update."""
        return bool(self.momentum and self._shards)

    def state_by_layer(self, network) -> Iterator[dict[str, np.ndarray]]:
        """Momentum of one layer after the other, logical, as "momentum.<weight's name>". Collective."""
        if self.has_state:
            for layer in network.gather_shards(self._shards):
                yield {f"momentum.{name}": value for name, value in layer.items()}

    def state_dict(self, network) -> dict[str, np.ndarray]:
        """Momentum of all weights; empty without any. Collective."""
        return {name: value for layer in self.state_by_layer(network) for name, value in layer.items()}

    def load_state_dict(self, state: dict[str, np.ndarray], network) -> None:
        """Take this rank's shard of what `state_dict` gave, on whatever number of ranks that was."""
        wrong = [name for name in state if not name.startswith("momentum.")]
        if wrong:
            raise ValueError(f"optimizer state: got {wrong}, wanted names that begin with 'momentum.'")
        plain = {name.removeprefix("momentum."): value for name, value in state.items()}
        self._shards = network.cut_shards(plain) if plain else {}

    def description(self) -> dict:
        """Hyper-parameters, for a checkpoint: numbers and strings only."""
        return {
            "kind": "SGD",
            "schedule": self.schedule.description(),
            "momentum": self.momentum,
            "weight_decay": self.weight_decay,
        }
