"""How a network's layers are spread over a grid of ranks: which Partition, who computes what, what must travel.

Between layers a rank holds its own images, all features of them. A layer with `Partition(data=G, model=M)`, M > 1,
keeps 1/M of its weights on each member of a group: those of a slice of its outputs. In its place in the network

    forward    gathers the inputs of the group's images, computes its slice of their outputs, and sends each
               image's outputs home ("to_images"); then the layer behind sees what it would see without the grid
    backward   does the adjoint of each in reverse order: the gradients of outputs go to their slices ("to_slices"),
               each member computes its term of the gradients of the inputs, and these are added up, each rank
               getting its own images'

so layers of unlike Partition follow each other freely, and nothing but the layer itself knows that it is shared.
Slices of outputs rather than of inputs: a member's kernels, fused activation included, are those of an ordinary
smaller layer, and a slice is contiguous in the blocked weights [the paper's volumes are those of this choice].
A slice is whole channel blocks: of 40 output channels with a SIMD width of 16, two members have 32 and 8.

Exact mode. The order of a sum decides its last bits, so every sum that ranks can share is made a tree over pieces
whose number is fixed: the weight gradient over pieces of the minibatch, the gradient of a layer's inputs over pieces
of its output channels. A rank computes whole pieces. All other sums (over input channels, taps, features) lie within
one kernel call, in an order that depends on neither the images around nor the slice.

Everything here is a pure function of numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from pcldnn.layers.base import LayerPlan
from pcldnn.partition import Partition, block_shares, bounds, share, shares, subtrees, tree_arrays
from pcldnn.scaling import best_grid

PIECES = 8  # in exact mode, unless another number is asked for


def check_exact(exact: bool | int, target: str) -> int:
    """Number of pieces that `exact` asks for; 0 when it does not ask."""
    pieces = PIECES if exact is True else int(exact)
    if pieces < 0 or pieces & (pieces - 1):
        raise ValueError(f"exact: got {exact!r}, wanted True, False or a power of two, the number of pieces")
    if pieces and target == "reference":
        raise ValueError("exact: the NumPy target adds in an order of its own; wanted a compiled target (PCLDNN_ISA)")
    return pieces


def image_shares(count: int, ranks: int, pieces: int = 0) -> tuple[int, ...]:
    """Images of each rank in a step: fair shares, or in exact mode whole pieces of the minibatch."""
    return block_shares(count, pieces, ranks) if pieces else shares(count, ranks)


# --- choosing ---------------------------------------------------------------------------------------------------


def resolve_partitions(named, partitions: dict | None, ranks: int) -> dict[str, Partition]:
    """Partitions by names of layers, from those that a user gave by layer or by nickname.

    "conv" means every convolution, "fc" every fully connected layer; "conv1", "conv2", ... are numbered. "fc6", "fc7",
    ... are those behind the Flatten of an image network, as in the papers on AlexNet and VGG, and "fc1", "fc2", ...
    those of a network without Flatten.
    """
    splittable = [name for name, layer in named if layer.splittable]
    short = nicknames(named)
    resolved = {}
    for key, partition in sorted((partitions or {}).items(), key=lambda item: item[0] not in ("conv", "fc")):
        names = [key] if key in dict(named) else short.get(key)
        if names is None:
            raise ValueError(f"partitions: got {key!r}, wanted the name of a layer ({', '.join(splittable)}) or "
                             f"{', '.join(short)}")  # fmt: skip
        if partition.ranks != ranks:
            raise ValueError(
                f"partitions: got {partition} for {key}, wanted data times model = {ranks}, the number of ranks"
            )
        if partition.model > 1 and not set(names) <= set(splittable):
            raise ValueError(
                f"partitions: got {partition} for {key}, wanted {ranks}x1: only convolutions and fully connected "
                "layers are split, and what follows one of them gets whole images again"
            )
        resolved |= dict.fromkeys(names, partition)
    return resolved


def nicknames(named) -> dict[str, list[str]]:
    """Names of layers by nickname: of one layer each, but for "conv" and "fc"."""
    found = {}
    for kind, first in (("conv", 1), ("fc", 6 if any(layer.aliasing == "view" for _, layer in named) else 1)):
        names = [name for name, layer in named if layer.nickname == kind]
        found |= {f"{kind}{first + i}": [name] for i, name in enumerate(names)} | {kind: names}
    return found


def choose_partition(layer: LayerPlan, minibatch: int) -> Partition:
    """The grid on which a layer sends least, by the volumes of `scaling.grid_bytes`.

    A convolution's weights count half (the paper's overlap is 1): they travel both ways behind its compute, which is
    long, while activations are waited for. So convolutions stay data parallel until minibatches are small.
    """
    ranks = layer.partition.ranks
    if not layer.layer.splittable or ranks == 1:
        return layer.partition
    sizes = layer.input.padded_features, layer.output.padded_features, layer.parameters[0].array_size
    groups = best_grid(ranks, minibatch, *sizes, layer.output.channel_blocks, 0.0 if layer.input.flat else 1.0)
    return Partition(groups, ranks // groups)


# --- who has what -----------------------------------------------------------------------------------------------


def output_cuts(layer: LayerPlan) -> tuple[int, ...]:
    """Output blocks of a layer that each member of a group holds; in exact mode whole pieces of them."""
    count, members = layer.output.channel_blocks, layer.partition.model
    return block_shares(count, layer.pieces, members) if layer.pieces else shares(count, members)


def member_part(layer: LayerPlan, member: int) -> LayerPlan:
    """What one member of a group has of a layer: all of it where there is only one."""
    return layer if layer.partition.model == 1 else layer.layer.part(layer, *bounds(output_cuts(layer), member))


def part_size(layer: LayerPlan, member: int = 0) -> int:
    """Numbers of the flat array of a member's part of the parameters; member 0 has the largest."""
    return member_part(layer, member).parameter_size if layer.parameters else 0


def image_leaves(layer: LayerPlan) -> tuple[tuple[int, int], ...]:
    """Pieces of the minibatch, start and stop, that each group computes in exact mode."""
    groups = [layer.partition.group(group) for group in range(layer.partition.data)]
    place = [share(layer.pieces, layer.partition.ranks, rank) for rank in range(layer.partition.ranks)]
    return tuple((place[ranks[0]][0], place[ranks[-1]][1]) for ranks in groups)


def sums_stay(layer: LayerPlan) -> bool:
    """Whether what each rank adds of a layer's weight gradient lies in the gradient's own place after the pass.

    So it is without exact mode, and in it where each group's pieces are one subtree: with 8 pieces on any power of two
    of ranks, and data parallel on any number but 3 (2x3 is another grid on which it is not so). Elsewhere some partial
    sums lie in memory that the next pass uses.
    """
    return not layer.pieces or all(len(subtrees(*leaves)) < 2 for leaves in image_leaves(layer))


def output_leaves(layer: LayerPlan) -> tuple[tuple[int, int], ...]:
    """Pieces of the outputs, start and stop, that each member of a group computes in exact mode."""
    members = layer.partition.model
    return tuple(share(layer.pieces, members, member) for member in range(members))


# --- what a rank needs ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GridArray:
    """A buffer that a layer on a grid, or in exact mode, needs beside its output and its input's gradient."""

    role: str
    size: int  # [float32]
    first: str  # passes from which to which it is alive
    last: str


def grid_arrays(layer: LayerPlan, training: bool) -> list[GridArray]:
    """What a layer needs more than it would on one rank without exact mode."""
    arrays, images = [], layer.group_images
    inputs, outputs = layer.input.padded_features, layer.output.padded_features
    part = member_part(layer, 0)
    if layer.partition.model > 1:
        read_again = "weight_grad" if training else "forward"
        output_read = read_again if "output" in layer.saves else "forward"
        arrays += [
            GridArray("group input", images * inputs, "forward", read_again),
            GridArray("slice output", images * part.output.padded_features, "forward", output_read),
            GridArray("forward staging", layer.images * outputs, "forward", "forward"),
        ]
        if layer.weight_grad:
            last = "input_grad" if layer.input_grad else "weight_grad"
            arrays += [
                GridArray("slice output_grad", images * part.output.padded_features, "weight_grad", last),
                GridArray("weight_grad staging", layer.images * outputs, "weight_grad", "weight_grad"),
            ]
        if layer.input_grad:
            arrays.append(GridArray("group input_grad", images * inputs, "input_grad", "input_grad"))
    return arrays + (_exact_arrays(layer, part) if layer.pieces and training else [])


def _exact_arrays(layer: LayerPlan, part: LayerPlan) -> list[GridArray]:
    """Partial sums of trees, one of them in the gradient's own place, and those of activations from other ranks."""
    arrays = []
    if layer.weight_grad:
        size = (_sums(image_leaves(layer)) - 1) * part.parameter_size
        arrays.append(GridArray("weight_grad sums", size, "weight_grad", "weight_grad"))
    if layer.input_grad and layer.layer.splittable:
        leaves = output_leaves(layer)
        inputs = layer.input.padded_features
        largest = shares(layer.output.channel_blocks, layer.pieces)[0]
        sizes = {
            "sums": (_sums(leaves) - 1) * layer.group_images * inputs,
            "arrivals": _arrivals(leaves) * layer.images * inputs,
            "columns": layer.group_images * largest * layer.output.block_features,
        }
        arrays += [GridArray(f"input_grad {role}", size, "input_grad", "input_grad") for role, size in sizes.items()]
    return [array for array in arrays if array.size > 0]


def _sums(leaves) -> int:
    """Partial sums that a rank holds at most."""
    return max(1, *(tree_arrays(*own) for own in leaves))


def _arrivals(leaves) -> int:
    """Partial sums that a rank gets from the others at most."""
    sent = [len(subtrees(*own)) for own in leaves]
    return sum(sent) - min(sent)


# --- what travels -----------------------------------------------------------------------------------------------


def activation_messages(layer: LayerPlan, counts: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Kinds and sizes [float32] of a layer's exchanges of activations, for the images of the ranks of a group."""
    if layer.partition.model == 1:
        return {}
    inputs = tuple(count * layer.input.padded_features for count in counts)
    outputs = tuple(sum(counts) * cut * layer.output.block_features for cut in output_cuts(layer))
    return {"gather_inputs": inputs, "to_images": outputs, "to_slices": outputs, "add_input_grads": inputs}
