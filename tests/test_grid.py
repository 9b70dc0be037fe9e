"""Layers on grids of ranks, and exact mode. Cases that run under mpirun: mpi/grid_cases.py."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcldnn import Flatten, Linear, Network, Partition, ReLU, grid, models, scaling
from pcldnn.layers import Conv2d
from pcldnn.partition import block_shares, share, subtrees, tree_arrays
from pcldnn.plan import plan

CASES = ("adjoint", "tree", "training", "few", "resumed", "diverged", "stop", "split", "chunks", "refused", "frames",
         "winograd")
RANKS = (1, 2, 3, 4, 6, 8)


@pytest.fixture(scope="module")
def ran(run_cases):
    """``ran(ranks, case)``: what each rank got in a case."""
    return run_cases("grid_cases.py", CASES, timeout=400, env={"OMP_WAIT_POLICY": "passive"})


def assert_same_training(got, wanted):
    np.testing.assert_allclose(got["losses"], wanted["losses"], rtol=1e-5)
    assert got["evaluation"] == wanted["evaluation"] == got["again"]


@pytest.mark.parametrize("ranks", RANKS)
def test_exchanges_are_adjoint(ran, ranks):
    assert max(ran(ranks, "adjoint")) < 1e-6


@pytest.mark.parametrize("ranks", RANKS)
def test_tree_sums_are_the_same_bits(ran, ranks):
    alone = ran(1, "tree")[0]
    assert all(result == alone for result in ran(ranks, "tree"))


@pytest.mark.parametrize("ranks", RANKS)
def test_every_grid_trains_as_one_rank(ran, ranks):
    """A13, for each grid and mixtures of them; in exact mode to the last bit of weights, momentum and losses."""
    serial = ran(1, "training")[0]
    default, exact = serial["chosen default"], serial["chosen exact"]
    for result in ran(ranks, "training"):
        for name, run in result.items():
            assert_same_training(run, default)
            if name.endswith("exact"):
                assert (run["bits"], run["digest"], run["losses"]) == (exact["bits"], exact["digest"], exact["losses"]), name


@pytest.mark.parametrize("ranks", RANKS)
def test_fewer_samples_than_ranks(ran, ranks):
    """A14, A15."""
    serial = ran(1, "few")[0]
    for result in ran(ranks, "few"):
        for name, runs in result.items():
            for run, default, exact in zip(runs, serial["chosen default"], serial["chosen exact"], strict=True):
                assert_same_training(run, default)
                if name.endswith("exact"):
                    assert (run["bits"], run["losses"]) == (exact["bits"], exact["losses"])


@pytest.mark.parametrize("ranks", RANKS)
def test_resume_on_another_grid(ran, ranks):
    """A25."""
    straight = ran(1, "training")[0]["chosen exact"]
    for rank, result in enumerate(ran(ranks, "resumed")):
        assert result["exact"]["bits"] == straight["bits"]
        np.testing.assert_allclose(result["default"]["losses"], straight["losses"][2:], rtol=1e-4)
        if rank == 0:
            assert result["names"] == ran(1, "resumed")[0]["names"]
            assert "momentum.classifier.3.weight" in result["names"]


@pytest.mark.parametrize("ranks", RANKS)
def test_divergence_in_a_shared_layer(ran, ranks):
    alone = ran(1, "diverged")[0]
    assert "input" in alone["culprits"].values()
    for result in ran(ranks, "diverged"):
        assert result["step"] == alone["step"]
        assert "input" in result["culprits"].values()
        assert result["text"] == ran(ranks, "diverged")[0]["text"]


@pytest.mark.parametrize("ranks", RANKS)
def test_one_rank_stops_all(ran, ranks):
    """A19."""
    for result in ran(ranks, "stop"):
        assert result == {"step": 4, "stopped": f"rank {ranks - 1}: enough"}


@pytest.mark.parametrize("ranks", RANKS)
def test_a_rank_holds_its_slice(ran, ranks):
    results = ran(ranks, "split")
    whole = ran(1, "split")[0]["held"]
    for name, size in whole.items():
        held = sum(result["held"][name] for result in results)
        assert held == size
    for rank, result in enumerate(results):
        assert result["same"]
        assert result["close"] and result["changed"] and result["kept"] and result["names"]
        assert result["was_split"] == (ranks > 1)
        assert not result["is_split"]
        assert result["shape"] == [rank, 10]


@pytest.mark.parametrize("ranks", RANKS)
def test_exchange_in_small_messages(ran, ranks):
    for result in ran(ranks, "chunks"):
        assert result["right"]
        assert "one for each" in result["messages"][0]
        assert "contiguous" in result["messages"][1]


def test_images_that_are_not_the_rank_s_share_are_refused(ran):
    for rank, text in enumerate(ran(2, "refused")):
        assert f"got 7 in a step of global_count 16 on rank {rank} of 2, wanted 8" in text


@pytest.mark.parametrize("ranks", RANKS)
def test_vectors_in_16_pieces(ran, ranks):
    alone = ran(1, "frames")[0]
    assert all(result == alone for result in ran(ranks, "frames"))


@pytest.mark.parametrize("ranks", RANKS)
def test_winograd_on_every_grid(ran, ranks):
    serial = ran(1, "winograd")[0]
    for result in ran(ranks, "winograd"):
        for name, run in result.items():
            np.testing.assert_allclose(run["losses"], serial["1x1 default"]["losses"], rtol=1e-5)
            if name.endswith("exact"):
                assert run == serial["1x1 exact"], name


# --- pure -------------------------------------------------------------------------------------------------------


@given(st.integers(0, 64), st.integers(0, 64))
def test_subtrees_cover_their_leaves(start, length):
    nodes = subtrees(start, start + length)
    leaves = [leaf for first, last in nodes for leaf in range(first, last)]
    assert leaves == list(range(start, start + length))
    for first, last in nodes:
        size = last - first
        assert size & (size - 1) == 0
        assert first % size == 0
    assert len(nodes) <= 2 * max(length, 1).bit_length()


@given(st.integers(0, 5), st.integers(1, 12), st.data())
def test_sum_leaves_needs_tree_arrays(levels, ranks, data):
    """The memory that the plan sets aside is what the sums take, and a tree does not depend on how it is shared."""
    from pcldnn.exchange import sum_leaves

    leaves = 2**levels
    sizes = data.draw(st.lists(st.integers(0, 1), min_size=leaves, max_size=leaves))
    for rank in range(ranks):
        own = share(leaves, ranks, rank)
        buffers = [np.zeros(1, np.float32) for _ in range(tree_arrays(*own))]

        def leaf(index, out):
            out[:] = 2.0**index

        for (start, stop), array in sum_leaves(range(*own), sizes, leaf, buffers):
            wanted = sum(2.0**i for i in range(start, stop) if sizes[i])
            assert (array is None and not wanted) or array[0] == wanted


@given(st.integers(0, 1000), st.sampled_from([1, 2, 8, 16]), st.integers(1, 20))
def test_block_shares_are_whole_blocks(count, blocks, parts):
    sizes = block_shares(count, blocks, parts)
    assert sum(sizes) == count
    assert len(sizes) == parts
    if parts == blocks:
        assert max(sizes) - min(sizes) <= 1


def test_the_plan_chooses_grids_by_volume():
    """Large fully connected layers are split, small layers are not, convolutions only for a few images a rank."""
    made = models.vgg_a().plan(64, ranks=4)
    chosen = {layer.name: layer.partition for layer in made.layers if layer.parameters}
    assert chosen["classifier.0"] == chosen["classifier.3"] == Partition(1, 4)
    convolutions = [name for name in chosen if name.startswith("features")]
    assert {chosen[name] for name in convolutions} == {Partition(4, 1)}
    few = {layer.name: layer.partition for layer in models.vgg_a().plan(4, ranks=4).layers if layer.parameters}
    assert [few[name].model for name in convolutions] == [1, 1, 1, 1, 1, 1, 4, 4]
    asked = models.vgg_a().plan(64, ranks=4, partitions={"conv8": Partition(1, 4), "conv": Partition(2, 2)})
    asked = [str(layer.partition) for layer in asked.layers if layer.name in convolutions]
    assert asked == ["2x2"] * 7 + ["1x4"]
    assert plan([Linear(40, 30), ReLU(), Linear(30, 10)], (40,), 64, ranks=4).layers[0].partition == Partition(4, 1)
    whole = models.vgg_a().plan(64, ranks=4, partitions={"fc": Partition(4, 1)})
    assert sum(m.bytes for m in made.messages) < 0.25 * sum(m.bytes for m in whole.messages)
    assert "1x4" in str(made)
    assert made.digest() != whole.digest()


@pytest.mark.parametrize(("nodes", "minibatch"), [(64, 256), (128, 512), (4, 64), (16, 1024)])
def test_best_grid_has_the_least_volume(nodes, minibatch):
    """Near the paper's G*, and nearer to data parallel the larger the minibatch."""
    sizes = 4096, 4096, 4096 * 4096
    best = scaling.best_grid(nodes, minibatch, *sizes, 512)
    volume = {g: scaling.grid_bytes(g, nodes, minibatch, *sizes) for g in range(1, nodes + 1) if nodes % g == 0}
    assert volume[best] <= 1.1 * min(volume.values())
    assert best / scaling.optimal_groups(nodes, minibatch, 4096, 4096) in (0.5, 1, 2)
    assert scaling.best_grid(nodes, 100_000_000, *sizes, 512) == nodes
    assert scaling.best_grid(nodes, minibatch, 4096, 8, 4096 * 8, most_members=1) == nodes


@pytest.mark.parametrize(("minibatch", "size"), [(4, 14), (16, 14), (64, 7), (1024, 28)])
def test_best_grid_of_a_convolution(minibatch, size):
    """The least of the paper's volumes, up to the way home of the outputs, for 512 channels and 3x3 filters."""
    sizes = 512 * size**2, 512 * size**2, 512 * 512 * 9
    best = scaling.best_grid(64, minibatch, *sizes, 32, overlap=1.0)
    conv = 64, minibatch, 512, 512, (3, 3), (size, size), 1.0
    assert best / scaling.optimal_groups(*conv) in (0.5, 1, 2)
    assert scaling.hybrid_bytes(best, *conv) <= scaling.hybrid_bytes(64, *conv)


def test_messages_of_a_grid_are_its_volume():
    """The bytes that the plan lists are those of the formula, for sizes that divide."""
    ranks, minibatch, width = 8, 64, 512
    dense = [Flatten(), Linear(width, width), ReLU(), Linear(width, width)]
    images = [Conv2d(128, 128, 1), ReLU(), Conv2d(128, 256, 3, stride=2, padding=1)]
    cases = [(dense, (8, 8, 8), "fc7", width, (width, width, width**2)),
             (images, (128, 4, 4), "conv2", 256, (128 * 16, 256 * 4, 128 * 256 * 9))]  # fmt: skip
    for partition, (layers, shape, name, outputs, sizes) in product(map(Partition, (2, 4, 8, 1), (4, 2, 1, 8)), cases):
        partitions = {"conv": Partition(8), "fc": Partition(8), name: partition}
        made = plan(layers, shape, minibatch, ranks, partitions=partitions)
        sent = {}
        for message in made.messages:
            if message.layer == made.layers[-1].name:
                own, count = message.sizes[0], len(message.sizes)
                part = own * (count - 1) if message.kind in ("gather_inputs", "allgather") else sum(message.sizes[1:])
                part = own * (count - 1) / count if message.kind in ("to_images", "to_slices") else part
                sent[message.kind] = 4 * part
        bias = 2 * 4 * outputs / partition.model * (1 - 1 / partition.data)
        assert sum(sent.values()) == pytest.approx(bias + scaling.grid_bytes(partition.data, ranks, minibatch, *sizes))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"partitions": {"fc9": Partition(2, 2)}}, ("fc9", "features.0", "classifier.0", "conv1", "fc6")),
        ({"partitions": {"fc6": Partition(2, 4)}}, ("2x4", "= 4")),
        ({"partitions": {"conv1": Partition(4, 4)}}, ("4x4", "conv1", "= 4")),
        ({"partitions": {"features.1": Partition(2, 2)}}, ("features.1", "4x1", "only convolutions and fully connected")),
        ({"exact": 3}, ("exact", "power of two")),
        ({"exact": -8}, ("exact",)),
    ],
)
def test_wrong_wishes_are_refused(options, words):
    layers = [Conv2d(1, 8, 3), ReLU(), Flatten(), Linear(128, 10)]
    with pytest.raises(ValueError, match="partitions|exact") as error:
        plan(layers, (1, 6, 6), 8, ranks=4, **options)
    assert all(word in str(error.value) for word in words)


def test_the_numpy_target_is_not_exact(monkeypatch):
    with pytest.raises(ValueError, match="NumPy target"):
        grid.check_exact(True, "reference")


def test_partition_from_text():
    assert Partition.parse("2x4") == Partition(2, 4)
    for text in ("2", "2x", "x4", "ax2", "2x-1", "0x4"):
        with pytest.raises(ValueError, match="Partition"):
            Partition.parse(text)


@pytest.mark.parametrize("algorithm", ["direct", "winograd"])
def test_exact_mode_on_one_rank_is_the_same_gradient(algorithm):
    layers = [Conv2d(3, 70, 3), ReLU(), Conv2d(70, 9, 3, padding=1), Flatten(), Linear(9 * 16, 21), ReLU(), Linear(21, 5)]
    random = np.random.default_rng(0)
    images, labels = random.standard_normal((13, 3, 6, 6)).astype(np.float32), random.integers(0, 5, 13)
    results = []
    for exact in (False, True, 2):
        network = Network(layers, (3, 6, 6), algorithm=algorithm)
        network.prepare(13, exact=exact)
        network._passes.arena[:] = np.nan
        loss, _ = network.forward_loss(images, labels)
        network.backward()
        assert len(network.piece_losses) == {False: 1, True: 8}.get(exact, exact)
        results.append((loss, network.gradients()))
    for loss, gradients in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-6)
        for name, value in gradients.items():
            np.testing.assert_allclose(value, results[0][1][name], rtol=1e-4, atol=1e-6)
