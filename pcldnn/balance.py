"""Balance of bytes and flops: what blockings cost, and the paper's search for the blocks that cost least.

- `conv_traffic`, `weight_grad_traffic`, `winograd_traffic`, `linear_traffic`, `linear_input_grad_traffic` predict the
  bytes that a pass moves between the L2 caches and what lies behind them, for the blocking that `blocking.py` chose.
  Divided by the flop of the pass and compared with the machine's balance (bytes a second over flop a second) they say
  whether the pass is bound by compute or by memory, as in the balance equations of Das et al. 2016.
- `best_block` answers the paper's own question for its seven loops: which block sizes need the fewest bytes per flop
  within a cache budget.

An array (or the part of one that is in use) stays in L2 while it fits half of it, and is read anew for each job
otherwise.
"""

from dataclasses import replace
from itertools import product
from math import ceil
from typing import NamedTuple

from pcldnn import winograd_blocking as winograd
from pcldnn.blocking import ConvBlocking, ConvShape, LinearBlocking, WeightGradBlocking, equal_sizes
from pcldnn.layout import FLOAT
from pcldnn.machine import Machine


def bound_by(traffic: float, flop: float, balance: float) -> str:
    """"memory" if `traffic` [byte] takes longer than `flop` on a machine of that balance [byte/flop]; or "compute"."""
    return "memory" if traffic > balance * flop else "compute"


def conv_traffic(shape: ConvShape, machine: Machine, blocking: ConvBlocking) -> int:
    """Bytes of the forward pass; for the input gradient `shape` is `blocking.gradient_shape`.

    A job is (image or tile of images, panel of output vectors, rows), in this order.
    """
    x, weights, y = _arrays(shape, machine)
    panels = ceil(ceil(shape.K / machine.width) / machine.tile[0])
    units = ceil(shape.N / machine.tile[1]) if blocking.across_images else shape.N
    lanes = shape.lanes or machine.width
    passes = 2 * ceil(ceil(shape.C / lanes) / blocking.c_blocks) - 1  # each sum but the first is read and written
    row = FLOAT * shape.Q * machine.tile[0] * machine.width * (machine.tile[1] if blocking.across_images else 1)
    x_reads = 1 if 2 * x <= units * machine.l2 else panels
    x_reads += 2 * blocking.across_images  # packed: read and written once more
    weight_reads = 1 if 2 * weights <= machine.l2 else units
    return x * x_reads + weights * weight_reads + y * (1 if 2 * row * blocking.rows <= machine.l2 else passes)


def weight_grad_traffic(shape: ConvShape, machine: Machine, blocking: WeightGradBlocking) -> int:
    """Bytes of the weight gradient. A job is (copy, panel of output vectors, input channel blocks), over its images."""
    x, weights, y = _arrays(shape, machine)
    panels = ceil(ceil(shape.K / machine.width) / machine.tile[0])
    groups = ceil(ceil(shape.C / (shape.lanes or machine.width)) / blocking.c_blocks)
    copies = max(min(blocking.copies, shape.N), 1)
    if 2 * (x + y) <= copies * machine.l2:
        panels = groups = 1  # the images of a copy stay
    packed = 2 * (x + y) if blocking.across_images else 0
    return x * panels + y * groups + packed + weights * (3 * copies - 2)  # copies: written, read, added


def winograd_traffic(
    shape: ConvShape, machine: Machine, blocking: winograd.WinogradBlocking, weight_grad: bool = False
) -> int:
    """Bytes of a Winograd pass: its arrays, transformed filters (or their gradient), and batches of transformed tiles.

    For the input gradient `shape` is `winograd_blocking.input_grad_shape`.
    """
    x, weights, y = _arrays(shape, machine)
    filters = FLOAT * winograd.filter_size(shape, machine)
    tiles = max(winograd.tile_counts(shape)[0], 1)
    batches = ceil(tiles / blocking.tiles)
    channels = ceil(shape.C / machine.width) + ceil(shape.K / machine.width)
    batch = FLOAT * winograd.POINTS * min(blocking.tiles, tiles) * channels * machine.width
    passes = 1 if 2 * filters <= machine.l2 else batches * (2 if weight_grad else 1)  # sums are read and written
    return x + y + weights + filters * (1 + passes) + (0 if 2 * batch <= machine.l2 else 2 * batch * batches)


def winograd_saving(shape: ConvShape, computed: ConvShape) -> float:
    """Multiply-adds of direct convolution over the products of Winograd: 324/64 for full tiles of 3x3 filters.

    `computed` is `shape`, for the input gradient its `winograd_blocking.input_grad_shape`.
    """
    return shape.P * shape.Q * shape.R * shape.S / winograd.tile_counts(replace(computed, N=1))[1]


def linear_traffic(
    summed: int, tiled: int, vectors: int, machine: Machine, blocking: LinearBlocking, weight_grad: bool = False
) -> int:
    """Bytes of the forward pass or the weight gradient of a fully connected layer; arguments as of `blocking.linear`.

    A job is a group of panels of vectors. It reads all of the packed array (summed x tiled) and its part of the other
    one. Of its sums, those of one visit stay in the weight gradient, which completes them before it goes on; in the
    forward pass all of them must, or are read and written at each visit.
    """
    outputs = vectors * machine.width
    packed, other, sums = FLOAT * summed * tiled, FLOAT * summed * outputs, FLOAT * tiled * outputs
    jobs = max(ceil(vectors / machine.tile[0] / blocking.panels), 1)
    packed_reads = 2 + (1 if 2 * packed <= machine.l2 else jobs)  # packing reads and writes
    if weight_grad:
        blocks_of_tiles = ceil(tiled / machine.tile[1] / blocking.tiles)
        return packed * packed_reads + sums + other * (2 + (1 if 2 * other <= jobs * machine.l2 else blocks_of_tiles))
    visits = 2 * ceil(summed / blocking.depth) - 1
    return packed * packed_reads + other + sums * (1 if 2 * sums <= jobs * machine.l2 else visits)


def linear_input_grad_traffic(
    samples: int, features: int, outputs: int, machine: Machine, blocking: LinearBlocking
) -> int:
    """Bytes of the input gradient of a fully connected layer.

    A job is a group of feature blocks. It reads all packed gradients and its part of the weights, these anew for each
    visit of `blocking.tiles` vectors of samples; its sums stay.
    """
    packed = FLOAT * ceil(samples / machine.width) * machine.width * outputs
    jobs = max(ceil(features / machine.width / blocking.panels), 1)
    packed_reads = 2 + (1 if 2 * packed <= machine.l2 else jobs)  # packing reads and writes
    visits = max(ceil(samples / machine.width / blocking.tiles), 1)
    return packed * packed_reads + FLOAT * features * (outputs * visits + samples)


def _arrays(shape: ConvShape, machine: Machine) -> tuple[int, int, int]:
    """Sizes of input, filters and output in memory [byte]."""
    lanes = shape.lanes or machine.width
    inputs, outputs = ceil(shape.C / lanes) * lanes, ceil(shape.K / machine.width) * machine.width
    return (
        FLOAT * shape.N * inputs * shape.H * shape.W,
        FLOAT * inputs * outputs * shape.R * shape.S,
        FLOAT * shape.N * outputs * shape.P * shape.Q,
    )


# --- the paper's question -----------------------------------------------------------------------------------------


class Block(NamedTuple):
    """Sizes of a block of the seven loops: images, input and output channels, output rows and columns, filter."""

    images: int
    ifm: int
    ofm: int
    rows: int
    columns: int
    filter_rows: int
    filter_columns: int


def block_bytes(shape: ConvShape, block: Block) -> tuple[int, int, int]:
    """Working set of a block [byte]: (input, weights, output), as derived from Das et al. 2016."""
    rows = (block.rows - 1) * shape.stride[0] + block.filter_rows
    columns = (block.columns - 1) * shape.stride[1] + block.filter_columns
    return (
        FLOAT * block.images * block.ifm * rows * columns,
        FLOAT * block.ifm * block.ofm * block.filter_rows * block.filter_columns,
        FLOAT * block.images * block.ofm * block.rows * block.columns,
    )


def bytes_per_flop(shape: ConvShape, block: Block, resident: str | None = None) -> float:
    """Bytes that enter or leave the cache per flop of a block (derived; Das et al. 2016, balance equation).

    Outputs are read and written. The array named `resident` ("input", "weights" or "output") stays in cache while
    blocks that share it follow one another, and costs nothing.
    """
    read, weights, written = block_bytes(shape, block)
    moved = {"input": read, "weights": weights, "output": 2 * written}
    flop = 2 * block.images * block.ifm * block.ofm * block.rows * block.columns
    flop *= block.filter_rows * block.filter_columns
    return sum(cost for array, cost in moved.items() if array != resident) / flop


def best_block(shape: ConvShape, budget: int = 128 * 1024, width: int = 8) -> tuple[Block, str, float]:
    """The block of fewest bytes per flop whose working set fits `budget` [byte], over all block sizes.

    Channels are cut in multiples of the SIMD width (or taken whole when there are fewer); the filter is never cut.
    The default budget is the paper's, 128 KB a thread.

    Returns
    -------
    (Block, resident array, bytes_per_flop [byte/flop])
    """
    ifms = [min(size * width, shape.C) for size in equal_sizes(ceil(shape.C / width))]
    ofms = [min(size * width, shape.K) for size in equal_sizes(ceil(shape.K / width))]
    best = None
    for sizes in product(equal_sizes(max(shape.N, 1)), ifms, ofms, equal_sizes(shape.P), equal_sizes(shape.Q)):
        block = Block(*sizes, shape.R, shape.S)
        if sum(block_bytes(shape, block)) > budget:
            continue
        for resident in _can_stay(shape, block):
            ratio = bytes_per_flop(shape, block, resident)
            if best is None or ratio < best[2]:
                best = (block, resident, ratio)
    if best is None:
        raise ValueError(f"budget: got {budget} bytes, which holds not even the smallest block of {shape}")
    return best


def _can_stay(shape: ConvShape, block: Block):
    """Arrays that the next block can share: along a dimension that is cut, the array that does not have it stays."""
    if block.ifm < shape.C:
        yield "output"
    if block.images < shape.N or block.rows < shape.P or block.columns < shape.Q:
        yield "weights"
    if block.ofm < shape.K:
        yield "input"
    yield None
