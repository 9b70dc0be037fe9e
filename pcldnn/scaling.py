"""What parallel training of a layer must compute and must move: the paper's model, as plain functions.

Notation of Das et al. 2016: N nodes, a global minibatch MB, ifm input and ofm output feature maps, `overlap` in [0, 1]
says how far sending and receiving go on at the same time (1: fully). All volumes are [byte] per node and step.
Formulas marked "derived" follow from the paper's definitions but were not read in it.
"""

from __future__ import annotations

from math import sqrt

from pcldnn.layout import FLOAT

# What a network could send while an exchange is being started: 10 microseconds at 10 GB/s. It keeps small layers from
# sending many small messages to save few bytes. Only its order of magnitude matters.
EXCHANGE_START = 100_000  # [byte]


def data_parallel_bytes(ifm: int, ofm: int, kernel: tuple[int, int] = (1, 1), overlap: float = 0.0) -> float:
    """Partial weight gradients out, new weights in [Das et al. 2016]; nearly the same for any number of nodes."""
    return FLOAT * ifm * ofm * kernel[0] * kernel[1] * (2 - overlap)


def model_parallel_bytes(ifm: int, minibatch: int, input_size: tuple[int, int] = (1, 1)) -> float:
    """Activations in the forward pass and their gradients in the backward pass (derived)."""
    return 2 * FLOAT * ifm * input_size[0] * input_size[1] * minibatch


def hybrid_bytes(
    groups: int, nodes: int, minibatch: int, ifm: int, ofm: int,
    kernel: tuple[int, int] = (1, 1), input_size: tuple[int, int] = (1, 1), overlap: float = 0.0,
) -> float:  # fmt: skip
    """`groups` groups of nodes/groups nodes: data parallel between groups, model parallel inside one (derived).

    groups = nodes is pure data parallelism (no activations move), groups = 1 pure model parallelism (no weights do).
    """
    activations = model_parallel_bytes(ifm, minibatch, input_size) / groups if groups < nodes else 0.0
    weights = data_parallel_bytes(ifm, ofm, kernel, overlap) * groups / nodes if groups > 1 else 0.0
    return activations + weights


def best_groups(
    nodes: int, minibatch: int, ofm: int,
    kernel: tuple[int, int] = (1, 1), input_size: tuple[int, int] = (1, 1), overlap: float = 0.0,
) -> float:  # fmt: skip
    """G* as a real number: where the derivative of the hybrid volume by G vanishes (derived).

    G* = sqrt(2 N MB in_w in_h / ((2 - overlap) ofm kw kh)); for a fully connected layer without overlap that is
    sqrt(N MB / ofm).
    """
    pixels, taps = input_size[0] * input_size[1], kernel[0] * kernel[1]
    return sqrt(2 * nodes * minibatch * pixels / ((2 - overlap) * ofm * taps))


def optimal_groups(
    nodes: int, minibatch: int, ifm: int, ofm: int,
    kernel: tuple[int, int] = (1, 1), input_size: tuple[int, int] = (1, 1), overlap: float = 0.0,
) -> int:  # fmt: skip
    """The divisor of `nodes` whose hybrid volume is least; with equal volumes the larger one, nearer to data parallel.

    Where it lies strictly between 1 and nodes it is a divisor next to `best_groups`; at the two ends one of the terms
    vanishes altogether, which the derivative does not see.
    """
    divisors = [groups for groups in range(1, nodes + 1) if nodes % groups == 0]
    layer = (nodes, minibatch, ifm, ofm, kernel, input_size, overlap)
    return min(divisors, key=lambda groups: (hybrid_bytes(groups, *layer), -groups))


# --- the exchanges that this program makes ----------------------------------------------------------------------


def grid_bytes(
    groups: int, nodes: int, minibatch: int, inputs: int, outputs: int, weights: int, overlap: float = 0.0
) -> float:
    """What a node sends in a step for a layer on a grid of groups x (nodes/groups) (derived).

    The paper's two terms, gathering inputs (and adding up their gradients) and exchanging weights, with the own share
    taken off, as it does not travel; and the way of the outputs from slices of channels back to whole images.

    Parameters
    ----------
    inputs, outputs : int
        Numbers of an image, before and behind the layer: ifm in_h in_w, ofm out_h out_w.
    weights : int
        Numbers: ifm ofm kh kw.
    overlap : float
        Of sending gradients and receiving weights: takes away up to half of their volume.
    """
    members = nodes // groups
    stays = 1 / members
    gathered = 2 * FLOAT * inputs * minibatch / groups * (1 - stays)
    returned = 2 * FLOAT * outputs * minibatch / nodes * (1 - stays)
    exchanged = (2 - overlap) * FLOAT * weights / members * (1 - 1 / groups)
    return gathered + returned + exchanged


def best_grid(
    nodes: int, minibatch: int, inputs: int, outputs: int, weights: int, most_members: int, overlap: float = 0.0
) -> int:
    """Groups of the grid on which a layer costs least, exchanges counted as EXCHANGE_START each.

    A group has at most `most_members` nodes; of equal costs the one nearer to data parallel. Sizes are those of
    `grid_bytes`.
    """

    def cost(groups):
        exchanges = 4 * (groups < nodes) + 2 * (groups > 1)
        moved = grid_bytes(groups, nodes, minibatch, inputs, outputs, weights, overlap)
        return moved + exchanges * EXCHANGE_START, -groups

    return min((g for g in range(1, nodes + 1) if nodes % g == 0 and nodes // g <= most_members), key=cost)
