"""Blocking of Winograd convolution, and whether it pays: the part of the solver for `winograd*.pxi`.

As in `blocking.py`, everything is a pure function of its arguments, and what can change a sum never depends on threads.
"""

from math import ceil
from typing import NamedTuple

from pcldnn._kernels import checks
from pcldnn.blocking import ConvShape, fma_per_cycle, step_cycles, taps_of
from pcldnn.layout import FLOAT
from pcldnn.machine import Machine

POINTS = checks.WINOGRAD_POINTS
LEAST_TILES, MOST_TILES = 64, 192  # of a batch: more gain nothing (measured)
MOST_GRADIENT_TILES = 96  # of the weight gradient
PRODUCT_SHARE, DIRECT_SHARE = 0.75, 0.82  # of the peak that the two kernels reach where nothing else limits them
TRANSFORM = 700  # cycles of a 6x6 tile of one channel block, in or out: arithmetic, and 64 lines to other places
FILTER_BYTES = 1.3  # bytes a cycle of a transformed filter on its way out and in again: it is larger than most caches


class WinogradBlocking(NamedTuple):
    """`blocking` of `forward` and its kin."""

    tiles: int  # in flight; in the weight gradient it sets the order of the sums
    k_blocks: int  # blocks of output channels whose products are held at a time
    c_blocks: int  # blocks of summed channels per visit of the products, which sets the order of the sums, too


def fits(shape: ConvShape, machine: Machine) -> bool:
    """Whether the Winograd kernels can compute a convolution: 3x3 or 5x5, stride 1, channels in blocks of a vector."""
    blocked = shape.lanes in (None, machine.width)
    square = shape.R == shape.S and shape.R in checks.WINOGRAD_KERNELS and shape.stride == (1, 1)
    return square and blocked and max(shape.padding) < shape.R


def input_grad_shape(shape: ConvShape) -> ConvShape:
    """The convolution of dy that the input gradient is."""
    padding = (shape.R - 1 - shape.padding[0], shape.S - 1 - shape.padding[1])
    return ConvShape(shape.N, shape.K, shape.P, shape.Q, shape.C, shape.R, shape.S, (1, 1), padding, shape.lanes)


def _cut(outputs: int, taps: int) -> tuple[int, int]:
    """(tiles, points) along a dimension: tiles of 8 points, and one of 4 or 6 for what remains."""
    step = 9 - taps
    full = (outputs + 1) // step
    rest = max(ceil((outputs - step * full) / 2) * 2, 0)
    return full + (rest > 0), 8 * full + (rest + taps - 1 if rest else 0)


def tile_counts(shape: ConvShape) -> tuple[int, int]:
    """(tiles, products of a pair of channels) of all images."""
    (rows, row_points), (columns, column_points) = _cut(shape.P, shape.R), _cut(shape.Q, shape.S)
    return shape.N * rows * columns, shape.N * row_points * column_points


def forward(shape: ConvShape, machine: Machine) -> WinogradBlocking:
    """Blocking of the forward pass, and of the input gradient for its `input_grad_shape`.

    Filters, the largest array of wide layers, are read once for each batch: the more tiles the better, as long as their
    transformed data stay in L3 (but for LEAST_TILES).
    """
    in_blocks, out_blocks = ceil(shape.C / machine.width), ceil(shape.K / machine.width)
    panel = FLOAT * machine.tile[0] * machine.width**2  # filters of a panel and one block of summed channels
    c_blocks = min(max(3 * machine.l1 // 4 // panel, 1), checks.WINOGRAD_SUM_CHANNELS // machine.width)
    c_blocks = ceil(in_blocks / ceil(in_blocks / c_blocks))
    room = (machine.l3 or 8 * machine.l2) // (FLOAT * POINTS * machine.width * (in_blocks + out_blocks))
    return WinogradBlocking(min(max(room, LEAST_TILES), MOST_TILES), out_blocks, c_blocks)


def weight_grad(shape: ConvShape, machine: Machine) -> WinogradBlocking:
    """Blocking of the weight gradient. It never looks at threads: the number of tiles sets the order of the sums.

    It reads and writes its sums once for each batch, whose transformed tiles are read again for each panel, from L2.
    """
    made = forward(shape, machine)
    return made._replace(tiles=min(made.tiles, MOST_GRADIENT_TILES))


def scratch(shape: ConvShape, machine: Machine, blocking: WinogradBlocking) -> int:
    """Memory for a batch [float32]: at least `winograd_scratch_size` of the kernels."""

    def odd_lines(size):
        return (ceil(size / 16) | 1) * 16

    tiles = min(blocking.tiles, tile_counts(shape)[0]) + 3  # each kind of tile is rounded by itself
    inputs, products = ceil(shape.C / machine.width) * machine.width, blocking.k_blocks * machine.width
    return POINTS * (odd_lines(tiles * odd_lines(inputs)) + odd_lines(tiles * products))


def filter_size(shape: ConvShape, machine: Machine) -> int:
    """Elements of the transformed filters."""
    return POINTS * ceil(shape.C / machine.width) * ceil(shape.K / machine.width) * machine.width**2


def pays(shape: ConvShape, machine: Machine) -> bool:
    """Whether a pass takes fewer modelled cycles by Winograd than directly.

    `shape` is that of the pass: `input_grad_shape` for the input gradient. Products, transforms of tiles and
    transforms of filters against multiply-adds of the direct kernel. The same on every rank: nothing is measured.
    """
    per_cycle = fma_per_cycle(machine)
    in_blocks, out_blocks = ceil(shape.C / machine.width), ceil(shape.K / machine.width)
    steps = in_blocks * machine.width * out_blocks / per_cycle  # cycles of a product of all channels
    tiles, products = tile_counts(shape)
    fill = step_cycles(machine, min(machine.tile[1], max(tiles, 1))) * per_cycle / machine.tile[0]
    fill /= min(machine.tile[1], max(tiles, 1))  # few tiles leave the register tile empty
    winograd = steps * products * fill / PRODUCT_SHARE + TRANSFORM * products / POINTS * (in_blocks + out_blocks)
    winograd += FLOAT * filter_size(shape, machine) / FILTER_BYTES
    rows = sum(len(taps) for taps in taps_of(shape.P, shape.R, 1, shape.padding[0], shape.H))
    columns = sum(len(taps) for taps in taps_of(shape.Q, shape.S, 1, shape.padding[1], shape.W))
    return winograd < steps * shape.N * rows * columns / DIRECT_SHARE
