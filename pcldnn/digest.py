"""Digests of the state of training: equal bits on any number of ranks, for any Partition, give equal digests."""

from __future__ import annotations

import hashlib
import itertools


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
