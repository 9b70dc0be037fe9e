"""The solver and its balance of bytes and flops: against search by hand, and against bounds that must hold."""

import runpy
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from pcldnn import balance, models
from pcldnn import blocking as solver
from pcldnn import winograd_blocking as winograd
from pcldnn.balance import Block, best_block, block_bytes, bytes_per_flop
from pcldnn.blocking import ConvShape
from pcldnn.layers import Conv2d, Linear
from pcldnn.layers.base import PASSES
from pcldnn.layout import Layout
from pcldnn.machine import Machine
from pcldnn.partition import Partition

MACHINES = [
    Machine("large", "avx512", 2, 48 * 1024, 2048 * 1024, 260 * 1024**2, flops=1e11, memory_bandwidth=2e10),
    Machine("middle", "avx2", 16, 32 * 1024, 512 * 1024, 16 * 1024**2, flops=1e11, memory_bandwidth=2e10),
    Machine("small", "sse2", 1, 32 * 1024, 256 * 1024, 0, flops=1e10, memory_bandwidth=1e10),
    Machine("phone", "neon", 8, 32 * 1024, 128 * 1024, 0, flops=1e10, memory_bandwidth=1e10),
]
REPORT = Path(__file__).resolve().parent.parent / "scripts" / "blocking_report.py"
NETWORKS = {name: network() for name, network in models.NETWORKS.items()}


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
@pytest.mark.parametrize("sizes", list(product((1, 13, 4096, 25088), (0, 64, 1024), (1, 63, 256))), ids=str)
def test_blocking_of_fully_connected_layers_fits_the_caches(machine, sizes):
    summed, tiled, vectors = sizes
    for threads in (1, 2, 64):
        depth, tiles, panels = solver.linear(summed, tiled, vectors, machine, threads)
        values, written = tiles * machine.tile[1], panels * machine.tile[0] * machine.width
        assert depth % machine.width == 0 and tiles <= max(-(-tiled // machine.tile[1]), 1)
        assert 4 * depth * (machine.tile[0] * machine.width + machine.tile[1]) <= machine.l2 // 4
        assert 4 * (values * depth + written * depth + values * written) <= machine.l2 // 2


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
@pytest.mark.parametrize("sizes", list(product((0, 1, 64, 1024), (16, 1008, 25088))), ids=str)
def test_blocking_of_the_input_gradient_of_fully_connected_layers(machine, sizes):
    samples, features = sizes
    for threads in (1, 2, 64):
        depth, vectors, blocks = solver.linear_input_grad(samples, features, machine, threads)
        assert depth % machine.width == 0 and 1 <= blocks <= features // machine.width
        assert 1 <= vectors <= max(-(-samples // machine.width), 1)
        assert vectors <= machine.tile[0] or 4 * depth * vectors * machine.width <= machine.l2 // 4
        assert vectors * blocks * machine.width**2 <= solver.SUMS


def test_blocking_of_fully_connected_layers_on_known_caches():
    """What was measured to be good: many tiles and panels, and on large caches more than 256 features at a time."""
    for machine in MACHINES[:2]:
        depth, tiles, panels = solver.linear(4096, 1024, 4096 // machine.width, machine)
        assert 256 <= depth <= 1024 and tiles >= 5 and 2 <= panels <= 16


def test_sizes_and_tiles_of_large_counts():
    """The short ways are those by hand."""
    for n in range(1, 200):
        assert solver.equal_sizes(n) == sorted({-(-n // parts) for parts in range(1, n + 1)})
        machine, tiles = MACHINES[0], -(-n // 6)
        widths = [n * (t + 1) // tiles - n * t // tiles for t in range(tiles)]
        wanted = sum(solver.step_cycles(machine, width) + 7 for width in widths)
        assert machine.tile[1] == 6 and solver.tiles_cycles(machine, n, each=7) == wanted
    assert len(solver.equal_sizes(10**12)) < 3e6


def test_filters_of_wide_convolutions_leave_most_of_l2():
    """What was measured to be good: VGG-A's deep layers in parts of a few hundred KB of filters, others whole."""
    for shape in ((8, 256, 28, 28, 512), (8, 512, 28, 28, 512), (8, 512, 14, 14, 512)):
        shape = ConvShape(*shape, 3, 3, (1, 1), (1, 1))
        assert 36 < solver.conv_forward(shape, MACHINES[0]).c_blocks * 36 <= 300
        assert 36 < solver.conv_input_grad(shape, MACHINES[0]).c_blocks * 36 <= 300
    for shape in ((8, 64, 112, 112, 128), (8, 128, 56, 56, 256)):
        assert solver.conv_forward(ConvShape(*shape, 3, 3, (1, 1), (1, 1)), MACHINES[0]).c_blocks * 16 == shape[1]


def test_images_no_larger_than_the_stride():
    """3x3 with stride 2 takes 2x2 pixels to one: the input gradient of that was once blocked by 0 rows."""
    for kernel, stride, pad, size in product(range(1, 8), range(1, 5), range(5), range(1, 8)):
        for axis in range(2):
            sizes, kernels, strides, pads = ([4, 4], [3, 3], [1, 1], [1, 1])
            sizes[axis], kernels[axis], strides[axis], pads[axis] = size, kernel, stride, pad
            shape = ConvShape(2, 3, *sizes, 5, *kernels, tuple(strides), tuple(pads))
            if min(shape.P, shape.Q) > 0:
                assert min(*solver.conv_input_grad(shape, MACHINES[1])[::2]) > 0
                gradient = solver.gradient_shape(shape)
                assert gradient.P >= -(-shape.H // strides[0]) and gradient.Q >= -(-shape.W // strides[1])


@pytest.mark.parametrize("shape", [ConvShape(1, 64, 112, 112, 128, 3, 3, (1, 1), (1, 1)),
                                   ConvShape(8, 96, 28, 28, 256, 7, 7, (1, 1), (3, 3))], ids=str)  # fmt: skip
def test_threads_do_not_change_the_order_of_weight_gradients(shape):
    for machine in MACHINES[:2]:
        cuts = [solver.conv_weight_grad(shape, machine, threads) for threads in (1, 8, 64)]
        assert len({(cut.band, cut.copies, cut.across_images) for cut in cuts}) == 1


def test_kernels_take_what_is_solved(target):
    """The limits of the solver are those of the kernels: the sums of the input gradient at their largest."""
    b = target.SIMD_WIDTH
    machine = next(machine for machine in MACHINES if machine.width == b)
    cut = solver.linear_input_grad(8, 4096 * b, machine)
    dy, weight = np.ones((1, 2 * b), np.float32), np.ones((2, 8 * b, b), np.float32)
    dx = np.empty((1, 8 * b), np.float32)
    target.linear_input_grad(dy, weight, dx, blocking=cut)
    assert (dx == 2 * b).all()


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
@pytest.mark.parametrize("net", NETWORKS)
def test_no_blocking_moves_less_than_every_array_once(machine, net):
    """Of the logical arrays; and on caches that hold everything, hardly more than that."""
    huge = Machine("huge", machine.target, 1, 2**20, 2**40)
    plans = [NETWORKS[net].plan(8, machine=m, algorithm="direct").layers for m in (machine, huge)]
    for layer, roomy in zip(*plans):
        for name in PASSES:
            made = getattr(layer, name)
            if made and made.blocking:
                weights = 4 * layer.parameters[0].array_size
                least = made.bytes - 4 * (layer.parameter_size - layer.parameters[0].array_size)
                assert made.traffic >= least, (layer.name, name)
                copies = getattr(made.blocking, "copies", 1)
                assert getattr(roomy, name).traffic <= 3 * least + 3 * copies * weights, (layer.name, name)


@pytest.mark.parametrize("algorithm", ["direct", "winograd"])
def test_a_member_of_a_group_plans_what_it_computes(algorithm):
    """A quarter of the outputs for the images of four ranks: blocking, scratch, traffic, flop and bytes of that."""
    machine, images, vector = MACHINES[0], Layout((64, 14, 14), 16), Layout.vector(512, 16)
    for layer, own, inputs in [
        (Linear(512, 1024), Linear(512, 256), vector),
        (Conv2d(64, 256, 3, padding=1), Conv2d(64, 64, 3, padding=1), images),
    ]:
        split = layer.plan(inputs, 8, machine, partition=Partition(1, 4), algorithm=algorithm)
        whole = own.plan(inputs, 32, machine, algorithm=algorithm)
        for name in PASSES:
            assert getattr(split, name) == getattr(whole, name), (layer, name)


def test_traffic_and_flop_are_of_the_same_work():
    """With slices that are not alike (of 3 blocks one member has 2), and with an input gradient in pieces."""
    vector, machine = Layout.vector(512, 16), MACHINES[0]
    uneven = Linear(512, 40).plan(vector, 8, machine, partition=Partition(1, 2)).forward
    own = Linear(512, 32).plan(vector, 16, machine).forward
    assert uneven.traffic / uneven.flop == pytest.approx(own.traffic / own.flop, rel=1e-4)
    exact = Linear(512, 1024).plan(vector, 8, machine, pieces=4, piece_images=2).input_grad
    own = Linear(512, 256).plan(vector, 8, machine).input_grad
    assert exact.traffic / exact.flop == pytest.approx(own.traffic / own.flop, rel=1e-4)


def test_winograd_moves_more_and_computes_less():
    shape, machine = ConvShape(8, 256, 56, 56, 256, 3, 3, (1, 1), (1, 1)), MACHINES[0]
    direct = balance.conv_traffic(shape, machine, solver.conv_forward(shape, machine))
    traffic = balance.winograd_traffic(shape, machine, winograd.forward(shape, machine))
    assert traffic > direct
    assert balance.bound_by(10, 100, 0.2) == "compute" and balance.bound_by(10, 100, 0.09) == "memory"


def test_the_saving_of_winograd_is_that_of_its_tiles():
    """Full tiles of 6x6 and 4x4 outputs take 64 products; what remains, 13 = 12 + 1 rows, smaller tiles."""
    def saving(size, taps, padding):
        layer = Conv2d(16, 16, taps, padding=padding)
        made = layer.plan(Layout((16, size, size), 16), 2, MACHINES[0], algorithm="winograd")
        return [getattr(made, name).saving for name in PASSES]

    assert saving(12, 3, 1) == [324 / 64] * 3
    assert saving(8, 5, 2) == [400 / 64] * 3
    assert saving(13, 3, 1) == [9 * 13**2 / (8 + 8 + 4) ** 2] * 3
    forward, weight_grad, input_grad = saving(14, 3, 0)  # 12x12 outputs, but 14 = 12 + 2 rows of the input gradient
    assert (forward, weight_grad, input_grad) == (324 / 64, 324 / 64, 9 * 12**2 / (8 + 8 + 4) ** 2)
    direct = Conv2d(16, 16, 3).plan(Layout((16, 14, 14), 16), 2, MACHINES[0], algorithm="direct")
    assert direct.forward.saving == 1


def test_the_search_finds_the_best_of_all_blocks():
    shape, budget = ConvShape(2, 3, 6, 5, 4, 3, 2, (2, 1), (0, 1)), 600
    block, resident, ratio = best_block(shape, budget, width=1)
    assert sum(block_bytes(shape, block)) <= budget and ratio == bytes_per_flop(shape, block, resident)
    extents = (shape.N, shape.C, shape.K, shape.P, shape.Q)
    for sizes in product(*(range(1, extent + 1) for extent in extents)):
        candidate = Block(*sizes, shape.R, shape.S)
        equal = all(-(-extent // -(-extent // size)) == size for extent, size in zip(extents, sizes))
        if sum(block_bytes(shape, candidate)) <= budget and equal:
            assert bytes_per_flop(shape, candidate) >= ratio
    with pytest.raises(ValueError, match="budget"):
        best_block(shape, 10)


def test_bytes_of_a_block_by_hand():
    """One output pixel of 1x1 filters: 2 inputs, 6 weights, 3 outputs read and written, 12 flop."""
    shape, block = ConvShape(1, 2, 4, 4, 3, 1, 1), Block(1, 2, 3, 1, 1, 1, 1)
    assert block_bytes(shape, block) == (8, 24, 12)
    assert bytes_per_flop(shape, block) == (8 + 24 + 24) / 12
    assert bytes_per_flop(shape, block, "output") == (8 + 24) / 12


def test_the_table_of_a_plan():
    network = NETWORKS["vgg_a"]
    lines = network.plan(32, threads=2, machine=MACHINES[0]).blocking_table().splitlines()
    assert "32 images and 2 threads, avx512, L1 48 KiB, L2 2,048 KiB" in lines[0]
    assert "20.0 GB/s over 2 x 100.0 Gflop/s = 0.1000 bytes/flop" in lines[1]
    assert len(lines) == 4 + 11 * 3 - 1  # no input gradient of the first layer
    forward = next(line for line in lines if "classifier.0" in line and "forward" in line)
    assert "depth 1024, tiles 6, panels 2" in forward and forward.endswith("compute")
    assert next(line for line in lines if "classifier.0" in line and "weight_grad" in line)
    with pytest.raises(ValueError, match="rates"):
        network.plan(32).blocking_table()


def test_the_report(monkeypatch, capsys):
    monkeypatch.setattr(Machine, "measured", lambda self: MACHINES[0])
    monkeypatch.setattr("sys.argv", [str(REPORT), "--networks", "cd_dnn", "--minibatch", "8", "--search"])
    runpy.run_path(str(REPORT), run_name="__main__")
    chosen, searched = capsys.readouterr().out.split("search over all blocks")
    assert chosen.startswith("cd_dnn\nblocking for 8 images") and chosen.count("weight_grad") == 8
    assert len(searched.strip().splitlines()) == 2 + 8
    monkeypatch.setattr("sys.argv", [str(REPORT), "--networks", "alexnet"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(REPORT), run_name="__main__")
    assert "got 'alexnet', wanted some of vgg_a" in capsys.readouterr().err
