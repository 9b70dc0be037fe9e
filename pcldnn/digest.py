"""Digests of the state of training: equal bits on any number of ranks, for any Partition, give equal digests."""

from __future__ import annotations

import hashlib


def layer_digests(network, optimizer) -> dict[str, str]:
    """SHA-256, hexadecimal, of each layer's weights and momentum in logical order; collective, the same on all ranks."""
    momentum = optimizer.state_dict(network)
    hashes = {}
    for name, value in network.state_dict().items():
        own = hashes.setdefault(name.rpartition(".")[0], hashlib.sha256())
        own.update(value)
        if f"momentum.{name}" in momentum:
            own.update(momentum[f"momentum.{name}"])
    return {layer: own.hexdigest() for layer, own in hashes.items()}


def total_digest(layers: dict[str, str]) -> str:
    """One SHA-256 of the digests of all layers, in order."""
    return hashlib.sha256("".join(layers.values()).encode()).hexdigest()
