"""Digests of the state of training: equal bits on any number of ranks, for any Partition, give equal digests.

Beside them stands what makes runs comparable at all: of two in exact mode with the same `run_identity`, which began
with the same weights, on CPUs with the same caches, digests have to be the same.
"""

from __future__ import annotations

import hashlib
import itertools

# What decides the numbers of a run, as a checkpoint's metadata name it.
_IDENTITY = ("network", "seed", "dataset", "augment", "minibatch", "steps_per_epoch", "optimizer", "pieces", "target",
             "algorithms")


def run_identity(metadata: dict) -> dict:
    """What decides the numbers of a run, of the metadata of its checkpoint; None for what they lack."""
    return {name: metadata.get(name) for name in _IDENTITY}


def network_digest(network) -> str:
    """16 hexadecimal digits of SHA-256 over layers with their names, shape of the input, and loss."""
    text = repr((network.layers, network.input_shape, network.loss))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def layer_digests(network, optimizer) -> dict[str, str]:
    """SHA-256, hexadecimal, of each layer's weights and momentum in logical order; collective, on all ranks."""
    hashes = {}
    for values in itertools.chain(network.state_by_layer(), optimizer.state_by_layer(network)):
        for name, value in values.items():
            layer = name.removeprefix("momentum.").rpartition(".")[0]
            hashes.setdefault(layer, hashlib.sha256()).update(value)
    return {layer: digest.hexdigest() for layer, digest in hashes.items()}


def total_digest(layers: dict[str, str]) -> str:
    """One SHA-256 of the digests of all layers, in order."""
    return hashlib.sha256("".join(layers.values()).encode()).hexdigest()
