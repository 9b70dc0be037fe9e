"""The balance-equation solver: how the loops of a layer are cut, from its shape and the machine's caches.

Two things are solved here, by trying every candidate, as Das et al. 2016 do:

- `conv_forward`, `conv_input_grad`, `conv_weight_grad` choose what the kernels take as `blocking`, by a model of the
  cycles of one core: multiply-adds in register tiles of unequal fill, the share of L2 that filters take, the fixed
  costs of tiles and loops, and the bytes that pass between caches and to memory.
- `linear` and `linear_input_grad` do so for the three passes of a fully connected layer.

Winograd convolution has `winograd_blocking.py`. What a solution costs in bytes per flop, and the paper's own search,
are in `balance.py`.
Everything is a pure function of its arguments. What can change a sum never depends on the number of threads: of the
weight gradient that is all but `c_blocks`.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from math import ceil
from typing import NamedTuple

from pcldnn.layout import FLOAT
from pcldnn.machine import Machine

FMA_LATENCY = 4.7  # [cycle]; 4, of Zen 2 to 4 and Skylake on, and what is lost where no chain may ever wait: 15 % of 8
# chains, which two multiply-adds a cycle would just saturate (measured with AVX2)
FORWARD_FMA_PER_CYCLE = 2  # of Sapphire Rapids, on which the costs of direct forward convolution were fitted
# Costs in cycles, of forward convolution fitted to measurements of VGG-A's and OverFeat's layers with AVX-512 and with
# AVX2 on Sapphire Rapids (3 % off on average), others on Zen 3 too:
FORWARD_TILE_START = 40  # to start and end a register tile: table look-ups, accumulators to and from L1 or L2
TILE_START = 50  # likewise of fully connected layers
CUT_LOOP = 13  # for an innermost loop over some pixels of a tile
ACROSS_LOOP = 8  # for one when the pixels of a tile lie in different images
WEIGHT_GRAD_TILE_START = 25  # likewise of the weight gradient, on Sapphire Rapids as the three that follow
RANGE_START = 10  # in the weight gradient: an indirect jump and loop set-up
OUT_OF_L1 = 0.13  # what it takes longer when dy, which its tiles share, comes from L2, along rows
LONG_STREAMS = 0.06  # likewise across images, in bands of any size
DY_OF_L1 = 0.6  # share of L1 that dy of a visit may have to stay there, beside x and sums
LINE_IN_ROW = 1  # for a cache line of a short piece of an image row, which the hardware does not prefetch in time
LINE_ACROSS = 4  # for a line of y when the pixels of a tile lie in different images
LOOP_START = 12  # of the weight gradient's innermost loop: its end is mispredicted, and the next one's reads begin late
PACK = 2  # to pack one number among those of other images
COPY = 4  # to copy one number a vector at a time, and to read it from where it then is
L2_BYTES = 16  # bytes a cycle from L2 that a kernel gets while it computes
L3_BYTES = 8  # from L3
MEMORY_BYTES = 5  # of outputs that are written more than once
IN_L2 = 0.25  # what computing takes longer when filters and rows fill L2, with the square of their share
ENOUGH_JOBS = 32  # independent blocks of dweight below which private copies are made: results on 2 and 64 cores agree
MOST_COPY_BYTES = 32 * 1024**2
LINE = 64  # [byte]


class ConvBlocking(NamedTuple):
    """`blocking` of `conv2d_forward` and `conv2d_input_grad`."""

    c_blocks: int  # blocks of summed channels per pass over the pixels
    across_images: bool  # a register tile takes the same pixel of several images, not neighbours of a row
    rows: int  # most output rows of a job


class WeightGradBlocking(NamedTuple):
    """`blocking` of `conv2d_weight_grad`."""

    band: int  # rows of dy per visit of a block of dweight
    c_blocks: int  # input channel blocks of a job
    copies: int  # copies of dweight that are summed in the end
    across_images: bool  # the innermost sum runs over images, not along a row


class LinearBlocking(NamedTuple):
    """`blocking` of `linear_forward` and its kin. None of the three changes a sum."""

    depth: int  # what a visit sums: features (forward), outputs (input gradient) or samples (weight gradient)
    tiles: int  # register tiles of a visit: of samples (weight gradient: features; input gradient: vectors of samples)
    panels: int  # most panels of output vectors that a job handles (input gradient: blocks of features)


@dataclass(frozen=True)
class ConvShape:
    """A convolution: N images, C to K channels, H x W inputs, R x S filters.

    `lanes` is the block size of the input channels: the SIMD width, or C of an unpadded network input.
    """

    N: int
    C: int
    H: int
    W: int
    K: int
    R: int
    S: int
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    lanes: int | None = None

    @property
    def P(self) -> int:
        return (self.H + 2 * self.padding[0] - self.R) // self.stride[0] + 1

    @property
    def Q(self) -> int:
        return (self.W + 2 * self.padding[1] - self.S) // self.stride[1] + 1

    @property
    def flop(self) -> int:
        """Work of one pass, taps in the padding counted [flop]."""
        return 2 * self.N * self.C * self.K * self.R * self.S * self.P * self.Q


# --- what the kernels take ----------------------------------------------------------------------------------------


def conv_forward(shape: ConvShape, machine: Machine) -> ConvBlocking:
    """Blocking of the forward pass: the candidate of fewest modelled cycles."""
    in_blocks = ceil(shape.C / (shape.lanes or machine.width))
    row = FLOAT * shape.Q * machine.tile[0] * machine.width
    rows = min(max(machine.l2 // 8 // row, 1), shape.P)  # what a job adds to again and again stays in L2
    candidates = product(equal_sizes(in_blocks), (False, True))
    return min((ConvBlocking(*c, rows) for c in candidates), key=lambda c: _forward_cycles(shape, machine, c))


def gradient_shape(shape: ConvShape) -> ConvShape:
    """The convolution of dy that the input gradient is: exactly for stride 1, nearly so for others."""
    rows, cols = ceil(shape.H / shape.stride[0]), ceil(shape.W / shape.stride[1])
    R, S = ceil(shape.R / shape.stride[0]), ceil(shape.S / shape.stride[1])
    padding = (max(ceil((rows - shape.P + R - 1) / 2), 0), max(ceil((cols - shape.Q + S - 1) / 2), 0))
    return ConvShape(shape.N, shape.K, shape.P, shape.Q, shape.C, R, S, (1, 1), padding)


def conv_input_grad(shape: ConvShape, machine: Machine) -> ConvBlocking:
    """Blocking of the input gradient."""
    return conv_forward(gradient_shape(shape), machine)


def conv_weight_grad(shape: ConvShape, machine: Machine, threads: int = 1) -> WeightGradBlocking:
    """Blocking of the weight gradient. `threads` influences only how blocks are dealt to jobs: `c_blocks`.

    `band` and `across_images` set the order of the sums, so they are those for one thread.
    """
    width = machine.width
    lanes = shape.lanes or width
    in_blocks, panels = ceil(shape.C / lanes), ceil(ceil(shape.K / width) / machine.tile[0])
    filter_bytes = FLOAT * ceil(shape.K / width) * width * in_blocks * lanes * shape.R * shape.S
    copies = min(ceil(ENOUGH_JOBS / (panels * in_blocks)), max(shape.N, 1), 1 + MOST_COPY_BYTES // filter_bytes)
    images = max(shape.N // copies, 1)

    def best(bands, across, threads):
        most = max(min(in_blocks, panels * in_blocks * copies // (2 * threads), 8), 1)
        candidates = product(bands, across, sorted({1, ceil(most / 4), ceil(most / 2), most}))

        def cycles(cut):  # of the thread with most jobs
            jobs = panels * ceil(in_blocks / cut[2]) * copies
            return _weight_grad_cycles(shape, machine, images, *cut) * ceil(jobs / threads) * threads / jobs

        return min(candidates, key=cycles)

    band, across, _ = best(equal_sizes(shape.P), (False, True), 1)
    _, _, c_blocks = best((band,), (across,), threads)
    return WeightGradBlocking(band, c_blocks, copies, across)


def pack_size(shape: ConvShape, machine: Machine) -> int:
    """Scratch that `conv2d_forward` needs to pack its input by tiles of images [float32]."""
    lanes, tiles = shape.lanes or machine.width, ceil(shape.N / machine.tile[1])
    return tiles * ceil(shape.N / max(tiles, 1)) * ceil(shape.C / lanes) * lanes * shape.H * shape.W


def equal_sizes(n: int) -> list[int]:
    """Block sizes that cut n in equal parts, up to rounding: the only ones worth trying."""
    sizes = [n] if n > 0 else []
    while sizes and sizes[-1] > 1:
        parts = ceil(n / (sizes[-1] - 1))  # the fewest that make smaller ones
        sizes.append(ceil(n / parts))
    return sizes[::-1]


def fma_per_cycle(machine: Machine) -> int:
    """Multiply-adds of whole vectors a cycle, of the cores that costs were fitted on but for forward: Zen 3, 4."""
    return 1 if machine.target == "avx512" else 2


def step_cycles(machine: Machine, pixels: int, per_cycle: int | None = None) -> float:
    """Cycles of one step of the micro-kernel with `pixels` active: bound by FMA throughput or by FMA latency.

    `per_cycle`: default `fma_per_cycle`.
    """
    return max(machine.tile[0] * pixels / (per_cycle or fma_per_cycle(machine)), FMA_LATENCY)


def tiles_cycles(machine: Machine, count: int, per_cycle: int | None = None, each: float = 0) -> float:
    """Cycles of a step of all the nearly equal tiles that `count` pixels are cut into, and `each` for every tile."""
    tiles = ceil(count / machine.tile[1])
    width, wider = divmod(count, max(tiles, 1))
    narrow = step_cycles(machine, width, per_cycle) if wider < tiles else 0
    wide = step_cycles(machine, width + 1, per_cycle) if wider else 0
    return (tiles - wider) * narrow + wider * wide + tiles * each


def _cut(count: int, tile: int) -> list[int]:
    """Starts and end of the nearly equal tiles that `count` pixels are cut into."""
    tiles = ceil(count / tile)
    return [count * t // tiles for t in range(tiles + 1)]


@lru_cache(maxsize=4096)
def taps_of(outputs: int, taps: int, stride: int, padding: int, inputs: int) -> tuple[range, ...]:
    """For each output position the filter taps that meet the input."""
    starts = [o * stride - padding for o in range(outputs)]
    return tuple(range(max(-s, 0), max(min(inputs - s, taps), max(-s, 0))) for s in starts)


def _row_cycles(shape: ConvShape, machine: Machine) -> tuple[float, int]:
    """(cycles per summed channel and filter row, segments of cut sums) of one row of tiles along an image row."""
    columns = taps_of(shape.Q, shape.S, shape.stride[1], shape.padding[1], shape.W)
    total, cut = 0.0, 0
    for first, last in pairwise(_cut(shape.Q, machine.tile[1])):
        spans = [[q for q in range(first, last) if tap in columns[q]] for tap in range(shape.S)]
        total += sum(step_cycles(machine, len(span), FORWARD_FMA_PER_CYCLE) for span in spans if span)
        changes = sum(a != b for a, b in pairwise(spans))
        cut += changes + 1 if changes else 0
    return total, cut


@lru_cache(maxsize=1024)
def _forward_compute(shape: ConvShape, machine: Machine, across_images: bool) -> tuple[float, int, int]:
    """(cycles per summed channel, register tiles, innermost loops of cut sums per channel block) of a panel."""
    rows = [len(taps) for taps in taps_of(shape.P, shape.R, shape.stride[0], shape.padding[0], shape.H)]
    if not across_images:
        cycles, cut = _row_cycles(shape, machine)
        tiles = shape.N * shape.P * ceil(shape.Q / machine.tile[1])
        return shape.N * sum(rows) * cycles, tiles, shape.N * sum(rows) * cut
    columns = [len(taps) for taps in taps_of(shape.Q, shape.S, shape.stride[1], shape.padding[1], shape.W)]
    images = max(shape.N, 1)
    per_pixel = tiles_cycles(machine, images, FORWARD_FMA_PER_CYCLE)
    return sum(rows) * sum(columns) * per_pixel, shape.P * shape.Q * ceil(images / machine.tile[1]), 0


def _forward_cycles(shape: ConvShape, machine: Machine, blocking: ConvBlocking) -> float:
    """Modelled cycles of one panel of output vectors: compute, starts of tiles and loops, and outputs written again.

    Outputs count alike whether they fit the caches (and are cheaper) or not: the order of sums may not depend on N.
    """
    lanes, (vectors, tile) = shape.lanes or machine.width, machine.tile
    in_blocks = ceil(shape.C / lanes)
    c_blocks, across, _ = blocking
    groups = ceil(in_blocks / c_blocks)
    compute, tiles, cut_loops = _forward_compute(shape, machine, across)
    inputs = shape.N * in_blocks * lanes * shape.H * shape.W
    outputs = shape.N * shape.P * shape.Q * vectors * machine.width
    panels = ceil(ceil(shape.K / machine.width) / vectors)
    weights = FLOAT * vectors * machine.width * c_blocks * lanes * shape.R * shape.S
    rows = FLOAT * (tile if across else 1) * c_blocks * lanes * shape.R * shape.W
    cycles = compute * in_blocks * lanes * (1 + IN_L2 * ((weights + rows) / machine.l2) ** 2)
    cycles += groups * tiles * FORWARD_TILE_START + cut_loops * in_blocks * CUT_LOOP
    if groups > 1:
        cycles += FLOAT * outputs / MEMORY_BYTES
    if across:
        cycles += tiles * in_blocks * shape.R * ACROSS_LOOP + FLOAT * outputs / LINE * LINE_ACROSS
        return cycles + PACK * inputs / panels
    lines = 1 + min(tile, shape.Q) * shape.stride[1] * lanes * FLOAT / LINE
    return cycles + tiles * in_blocks * shape.R * lines * LINE_IN_ROW


def _weight_grad_cycles(
    shape: ConvShape, machine: Machine, images: int, band: int, across: bool, c_blocks: int
) -> float:
    """Modelled cycles of one panel of output vectors and one input channel block over `images` images."""
    vectors, tile = machine.tile
    lanes = shape.lanes or machine.width
    if lanes < tile and not across:  # tiles take whole filter columns, or lie within one
        cuts = [lanes * tap for tap in _cut(shape.S, tile // lanes)]
    else:
        cuts = [lanes * tap + cut for tap in range(shape.S) for cut in _cut(lanes, tile)[:-1]] + [lanes * shape.S]
    tiles = shape.R * (len(cuts) - 1)
    rows = [len(taps) for taps in taps_of(shape.P, shape.R, shape.stride[0], shape.padding[0], shape.H)]
    columns = taps_of(shape.Q, shape.S, shape.stride[1], shape.padding[1], shape.W)
    steps, changes = 0.0, 0
    for first, last in pairwise(cuts):
        spans = [(max(t.start * lanes, first), min(t.stop * lanes, last)) for t in columns]
        steps += sum(step_cycles(machine, stop - start) for start, stop in spans if stop > start)
        changes += sum(a != b for a, b in pairwise(spans)) + 1
    depth = images if across else 1  # images that a visit of a block of dweight covers
    visits = ceil(shape.P / band) * (images / depth)
    dy = FLOAT * band * shape.Q * vectors * machine.width * depth
    x_rows = min((band - 1) * shape.stride[0] + shape.R, shape.H)
    x = FLOAT * x_rows * shape.W * lanes * depth
    from_l2 = (dy + x) * (1 if dy + x <= machine.l1 else tiles)
    room = machine.l2 // 2 - (0 if across else dy)  # dy of the next visit is asked for
    fits = dy + c_blocks * x <= room
    fresh = x if not fits else min(x, FLOAT * band * shape.stride[0] * shape.W * lanes * depth)
    from_l3 = dy / c_blocks + fresh
    if dy + x > room:
        from_l3 = (dy + x) * tiles
    compute = max(steps * sum(rows) * images, visits * from_l2 / (2 * L2_BYTES))
    if across or dy > DY_OF_L1 * machine.l1:
        compute *= 1 + (LONG_STREAMS if across else OUT_OF_L1)
    apart = across and (images < shape.N or shape.stride[1] > 1)  # whether columns of a row are loops of their own
    loops = sum(rows) / shape.R * tiles * (shape.Q if apart else 1) * (images / depth)
    sums = 2 * FLOAT * shape.R * shape.S * lanes * vectors * machine.width
    starts = tiles * WEIGHT_GRAD_TILE_START + shape.R * changes * RANGE_START
    visit = sums / (2 * L2_BYTES) + from_l3 / L3_BYTES + starts  # of the sums one half is read beside multiply-adds
    cycles = compute + visits * visit + loops * LOOP_START
    if across:
        panels, in_blocks = ceil(ceil(shape.K / machine.width) / vectors), ceil(shape.C / lanes)
        inputs, outputs = lanes * shape.H * shape.W, vectors * machine.width * shape.P * shape.Q
        cycles += COPY * images * (inputs / panels + outputs / in_blocks)
    return cycles


# --- fully connected layers ---------------------------------------------------------------------------------------

MOST_FEATURE_BLOCKS = 64  # of a job: tiles of any width are full by then
GRADIENT_SAMPLES = 64  # of a visit of the input gradient: with 128, from L2, it took 4 to 10 % longer (AVX-512)
SUMS = 65536  # of a job of the input gradient: the kernel has no more room [elements]


@lru_cache(maxsize=1024)
def linear(summed: int, tiled: int, vectors: int, machine: Machine, threads: int = 1) -> LinearBlocking:
    """Blocking of the forward pass or the weight gradient of a layer of N samples, F features and K outputs.

    Parameters
    ----------
    summed, tiled, vectors : int
        What the pass sums over, what register tiles run along, and vectors of SIMD width of what it writes: (F, N,
        K/b) forward, (N, F, K/b) for the weight gradient.
    """
    per_tile, tile = machine.tile
    # In L2, not in L1: it is partial sums that cost. Twice the depth takes 1 to 7 % less where sums leave the caches.
    depth = min(_linear_depth(machine, machine.l2 // 4), max(ceil(summed / machine.width), 1) * machine.width)
    panels = equal_sizes(max(ceil(vectors / per_tile), 1))
    candidates = [LinearBlocking(depth, *c) for c in product(equal_sizes(max(ceil(tiled / tile), 1)), panels)]
    fitting = [c for c in candidates if _linear_block(machine, c) <= machine.l2 // 2] or candidates[:1]
    tiled = max(tiled, 1)  # a rank may have no images
    compute = summed * tiles_cycles(machine, tiled)

    def cycles(cut):  # of the thread with most jobs
        from_l2, from_l3 = _linear_bytes(summed, tiled, machine, cut)
        starts = ceil(summed / cut.depth) * ceil(tiled / tile) * TILE_START
        job = cut.panels * (compute + starts + from_l2 / L2_BYTES) + from_l3 / L3_BYTES
        return ceil(ceil(vectors / per_tile / cut.panels) / threads) * job

    return min(fitting, key=cycles)


def _linear_depth(machine: Machine, room: int) -> int:
    """The largest power of two for which the values and the weights of a register tile fit `room` [byte]."""
    vectors, tile = machine.tile
    depth = machine.width
    while 2 * depth * FLOAT * (vectors * machine.width + tile) <= room:
        depth *= 2
    return depth


@lru_cache(maxsize=1024)
def linear_input_grad(samples: int, features: int, machine: Machine, threads: int = 1) -> LinearBlocking:
    """Blocking of the input gradient, whose vectors run over samples and whose tiles run over features.

    Few samples at a time, so that many features fit a job, and no more than leave their gradients in a quarter of L2;
    then the number of feature blocks whose tiles are full and whose jobs come out even among the threads.
    """
    width = machine.width
    depth = _linear_depth(machine, machine.l1)
    most = max(machine.l2 // 4 // (FLOAT * depth * width) // machine.tile[0], 1) * machine.tile[0]
    vectors = min(ceil(min(max(samples, 1), GRADIENT_SAMPLES) / width), most)
    blocks = max(features // width, 1)

    def cycles(size):  # of the thread with most jobs, for one step of the sum
        visit = machine.tile[0] * width * FLOAT / L2_BYTES + TILE_START / depth  # gradients and start of a tile
        job = tiles_cycles(machine, size * width, each=visit)
        return ceil(ceil(blocks / size) / threads) * job

    most = min(max(SUMS // (vectors * width**2), 1), blocks, MOST_FEATURE_BLOCKS)
    return LinearBlocking(depth, vectors, min(range(1, most + 1), key=cycles))


def _linear_block(machine: Machine, blocking: LinearBlocking) -> int:
    """Working set of a visit [byte]: packed samples, weights and sums of all panels of a job."""
    depth, tiles, panels = blocking
    samples, outputs = tiles * machine.tile[1], panels * machine.tile[0] * machine.width
    return FLOAT * (samples * depth + outputs * depth + samples * outputs)


def _linear_bytes(summed: int, tiled: int, machine: Machine, blocking: LinearBlocking) -> tuple[int, int]:
    """Bytes that pass from L2 to L1 for a panel, and from L3 to L2 for a job beside its weights."""
    outputs = machine.tile[0] * machine.width
    weights = outputs * summed * ceil(tiled / machine.tile[1] / blocking.tiles)  # for each block of tiles anew
    sums = tiled * outputs * (2 * ceil(summed / blocking.depth) - 1)
    return FLOAT * (tiled * summed + weights + sums), FLOAT * tiled * summed
