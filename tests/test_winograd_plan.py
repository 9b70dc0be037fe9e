"""The plan's choice between direct and Winograd convolution, and networks that are computed either way."""

from itertools import product

import numpy as np
import pytest

from pcldnn import Network, models
from pcldnn import _kernels as kernels
from pcldnn import blocking as solver
from pcldnn import winograd_blocking as winograd
from pcldnn.layers import Conv2d, Flatten, Linear, MaxPool2d, ReLU
from pcldnn.machine import Machine
from pcldnn.plan import plan

MACHINES = [Machine("sse2", "sse2", 1), Machine("avx2", "avx2", 2, l2=2**19, l3=2**25), Machine("avx512", "avx512", 4)]
SMALL = [Conv2d(3, 16, 3, padding=1), ReLU(), Conv2d(16, 24, 3, padding=1), ReLU(), MaxPool2d(2),
         Conv2d(24, 20, 3, padding=2), ReLU(), Conv2d(20, 16, 3), Flatten(), Linear(256, 5)]  # fmt: skip


def algorithms(made):
    """Of all convolutions and passes."""
    passes = [(p, getattr(layer, p)) for layer in made.layers if isinstance(layer.layer, Conv2d)
              for p in ("forward", "weight_grad", "input_grad")]  # fmt: skip
    return [made.algorithm for _, made in passes if made]


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_the_large_networks_use_winograd_where_they_can(machine):
    vgg = models.vgg_a().plan(32, machine=machine)
    assert algorithms(vgg) == ["direct"] * 2 + ["winograd"] * 21
    overfeat = models.overfeat_fast().plan(32, machine=machine)
    assert algorithms(overfeat) == ["direct"] * 2 + ["winograd"] * 12
    assert str(vgg).count("winograd") == 7 and "algorithm" in str(vgg)


def test_few_channels_and_few_images_stay_direct():
    assert set(algorithms(plan([Conv2d(8, 8, 3, padding=1)], (8, 1, 1), 1, machine=MACHINES[1]))) == {"direct"}
    assert set(algorithms(plan([Conv2d(512, 512, 3)], (512, 4, 4), 1, machine=MACHINES[1]))) == {"direct"}


def test_the_traffic_of_filters_counts():
    """As measured: 14x14 images of 8 gain by Winograd; of 2, and 4x4 images of 32, they lost or gained nothing."""
    machine = Machine("large", "avx512", 2, 48 * 1024, 2048 * 1024, 260 * 1024**2)
    for images, size, way in ((8, 14, "winograd"), (2, 14, "direct"), (32, 4, "direct")):
        made = plan([Conv2d(512, 512, 3, padding=1)], (512, size, size), images, machine=machine)
        assert set(algorithms(made)) == {way}, (images, size)


def test_overrides(monkeypatch):
    network = models.vgg_a()
    assert set(algorithms(network.plan(32, algorithm="direct"))) == {"direct"}
    monkeypatch.setenv("PCLDNN_CONV", "direct")
    assert set(algorithms(network.plan(32))) == {"direct"}
    assert "winograd" in algorithms(network.plan(32, algorithm="auto")), "the argument is stronger than the environment"
    monkeypatch.setenv("PCLDNN_CONV", "winograd")
    assert algorithms(plan(SMALL, (3, 8, 8), 1)) == ["direct"] * 2 + ["winograd"] * 9
    monkeypatch.setenv("PCLDNN_CONV", "fft")
    with pytest.raises(ValueError, match="PCLDNN_CONV: got 'fft', wanted one of auto, direct, winograd"):
        network.plan(32)
    with pytest.raises(ValueError, match="algorithm: got 'Direct'"):
        network.plan(32, algorithm="Direct")


def test_ranks_that_would_compute_differently_are_found():
    network = models.vgg_a()
    assert network.plan(32).digest() != network.plan(32, algorithm="direct").digest()


def test_planned_scratch_is_what_the_kernels_ask_for_and_bounded():
    machine = Machine.detect()
    if not hasattr(kernels, "fma_loop"):
        pytest.skip("the twins need no scratch")
    for n, c, size, k in product((1, 2, 33), (3, 64, 200), (1, 7, 14, 30), (8, 100)):
        shape = solver.ConvShape(n, c, size, size, k, 3, 3, (1, 1), (1, 1))
        in_blocks, out_blocks = -(-c // machine.width), -(-k // machine.width)
        for made in (winograd.forward(shape, machine), winograd.weight_grad(shape, machine)):
            tiles = winograd.tile_counts(shape)[0]
            batches = max(-(-tiles // made.tiles), 1)
            wanted = kernels.winograd_scratch_size(in_blocks, out_blocks, -(-tiles // batches) + 3)
            assert winograd.scratch(shape, machine, made) >= wanted


def test_the_solver_knows_the_kernels_tiles():
    """Points along a dimension: 8 for 6 outputs, 6 for 4, 4 for 2."""
    sizes = {1: 4, 2: 4, 3: 6, 4: 6, 5: 8, 6: 8, 7: 12, 8: 12, 9: 14, 12: 16, 13: 20, 14: 20, 28: 38, 56: 76, 112: 150}
    for size, points in sizes.items():
        shape = solver.ConvShape(1, 8, size, size, 8, 3, 3, (1, 1), (1, 1))
        assert winograd.tile_counts(shape)[1] == points**2
    for size, points in {1: 6, 2: 6, 3: 8, 4: 8, 5: 14, 6: 14, 7: 16, 24: 48, 28: 56}.items():
        shape = solver.ConvShape(1, 8, size, size, 8, 5, 5, (1, 1), (2, 2))
        assert winograd.tile_counts(shape)[1] == points**2


def test_weight_gradients_do_not_depend_on_threads():
    one, two = (models.vgg_a().plan(32, threads=threads) for threads in (1, 2))
    assert [layer.weight_grad.blocking.tiles for layer in one.layers if layer.name in ("features.3", "features.18")] == [
        layer.weight_grad.blocking.tiles for layer in two.layers if layer.name in ("features.3", "features.18")
    ]


def step(algorithm, threads, images=5):
    """Loss, logits and gradients of one step of SMALL."""
    network = Network(SMALL, (3, 8, 8), seed=3, algorithm=algorithm)
    network.prepare(7, threads=threads)
    x = np.random.default_rng(0).random((images, 3, 8, 8), np.float32)
    loss, logits = network.forward_loss(x, np.arange(images) % 5)
    logits = logits.copy()
    network.backward()
    return loss, logits, network.gradients()


def test_a_step_is_the_same_both_ways(target):
    (loss, logits, gradients), (direct_loss, direct_logits, direct_gradients) = step("winograd", 1), step("direct", 1)
    assert loss == pytest.approx(direct_loss, rel=1e-5)
    np.testing.assert_allclose(logits, direct_logits, atol=2e-5 * np.abs(direct_logits).max())
    for name, value in direct_gradients.items():
        np.testing.assert_allclose(gradients[name], value, atol=1e-4 * np.abs(value).max(), err_msg=name)


def test_a_step_is_bit_identical_for_any_number_of_threads(target):
    _, logits, gradients = step("winograd", 1)
    for threads in (2, 3):
        _, again, others = step("winograd", threads)
        assert np.array_equal(logits, again)
        assert all(np.array_equal(gradients[name], others[name]) for name in gradients)


@pytest.mark.parametrize("size", [3, 5])
def test_a_lone_layer_obeys_the_environment(monkeypatch, target, size):
    layer = Conv2d(20, 16, size, padding=1)
    x = np.random.default_rng(0).standard_normal((3, 20, 9, 7), np.float32)
    results = {}
    for algorithm in ("direct", "winograd"):
        monkeypatch.setenv("PCLDNN_CONV", algorithm)
        y = layer.forward(x)
        assert layer._lone.unit.plan.forward.algorithm == algorithm
        results[algorithm] = (y, layer.weight_grad(y)["weight"], layer.input_grad(y))
    for one, other in zip(*results.values(), strict=True):
        np.testing.assert_allclose(one, other, atol=5e-5 * np.abs(other).max())


def test_exact_mode_has_scratch_for_all_images_of_a_call(target):
    """Blocking is for a piece of the minibatch, but forward and input gradient are called with all of it."""
    if kernels.TARGET == "reference":
        pytest.skip("it is not exact")
    results = []
    for exact in (False, 4):
        network = Network(SMALL, (3, 8, 8), seed=3, algorithm="winograd")
        network.prepare(40, threads=1, exact=exact)
        network.forward_loss(np.random.default_rng(0).random((40, 3, 8, 8), np.float32), np.arange(40) % 5)
        network.backward()
        results.append(network.gradients())
    for name, value in results[0].items():
        np.testing.assert_allclose(results[1][name], value, atol=1e-4 * np.abs(value).max(), err_msg=name)
