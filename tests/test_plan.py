"""The plan: names, counts, memory, messages, and the paper's volumes."""

import dataclasses
import itertools

import pytest

from pcldnn import models, scaling
from pcldnn.layers import AvgPool2d, Conv2d, Dropout, Flatten, Linear, MaxPool2d, ReLU, Sigmoid
from pcldnn.layout import Layout
from pcldnn.machine import Machine
from pcldnn.partition import Partition
from pcldnn.plan import Plan, name_layers, plan
from pcldnn.text import format_bytes

MACHINES = {4: Machine("small", "sse2", 1), 8: Machine("middle", "avx2", 2), 16: Machine("large", "avx512", 4)}
CNN = [
    Conv2d(3, 10, 3, padding=1), ReLU(), Dropout(0.1), MaxPool2d(2), Sigmoid(), Dropout(0.2), Flatten(),
    Linear(90, 33), ReLU(), Dropout(), Linear(33, 5),
]  # fmt: skip


@pytest.fixture(scope="module")
def vgg():
    return models.vgg_a()


def test_vgg_a_counts_are_the_papers(vgg):
    """PAPER.md section 11: derived from the geometry there."""
    training = vgg.plan(32)
    convolutions = [layer for layer in training.layers if isinstance(layer.layer, Conv2d)]
    assert training.parameter_count == 132_863_336
    assert sum(layer.forward.flop for layer in convolutions) / 32 / 2 == pytest.approx(7.485e9, rel=1e-3)
    assert training.flop() == pytest.approx(45.5e9, rel=1e-3)
    assert convolutions[0].input_grad is None
    assert training.flop("forward") == 2 * (sum(layer.forward.flop for layer in training.layers) // 64)


def test_overfeat_counts_are_the_papers():
    training = models.overfeat_fast().plan(1)
    convolutions = [layer for layer in training.layers if isinstance(layer.layer, Conv2d)]
    linears = [layer for layer in training.layers if isinstance(layer.layer, Linear)]
    assert [layer.computed.shape[1] for layer in convolutions] == [56, 24, 12, 12, 12]
    assert sum(layer.forward.flop for layer in convolutions) / 2 == pytest.approx(2.671e9, rel=1e-3)
    assert sum(layer.parameters[0].count for layer in convolutions) == pytest.approx(15.98e6, rel=1e-3)
    assert sum(layer.parameters[0].count for layer in linears) == pytest.approx(129.9e6, rel=1e-3)
    assert training.flop() == pytest.approx(16.6e9, rel=1e-2)


def test_cd_dnn_counts():
    training = models.cd_dnn().plan(1024)
    weights = [layer.parameters[0].count for layer in training.layers if layer.parameters]
    assert sum(weights) == pytest.approx(45.1e6, rel=1e-3)
    assert training.flop() == pytest.approx(271e6, rel=1e-2)


def test_default_names_are_torchvisions():
    names = [name for name, _ in name_layers(CNN)]
    assert names[:7] == [*(f"features.{i}" for i in range(6)), "flatten"]
    assert names[7:] == [f"classifier.{i}" for i in range(4)]
    assert [name for name, _ in name_layers([Linear(3, 2), ReLU()])] == ["0", "1"]
    assert [name for name, _ in name_layers([("fc", Linear(3, 2)), ReLU()])] == ["fc", "1"]


def test_bad_lists_are_refused():
    with pytest.raises(ValueError, match="got none"):
        plan([], (3,), 1)
    with pytest.raises(ValueError, match="'a' is used twice"):
        plan([("a", ReLU()), ("a", ReLU())], (3,), 1)
    with pytest.raises(TypeError, match=r"layers\[1\]"):
        plan([ReLU(), "ReLU"], (3,), 1)
    for shape in [(3, 4), (0, 1, 1), (3, 4, 5, 6), ("3",)]:
        with pytest.raises(ValueError, match="input_shape"):
            plan([ReLU()], shape, 1)
    with pytest.raises(ValueError, match="minibatch: got 0"):
        plan([ReLU()], (3,), 0)


def test_shapes_that_cannot_work_name_the_layer_and_the_numbers():
    """A6."""
    with pytest.raises(ValueError, match=r"layer 0, Conv2d.*size 2 with padding 0 .* kernel of size 3 \(stride 1\)"):
        plan([Conv2d(1, 8, 3)], (1, 2, 2), 1)
    with pytest.raises(ValueError, match=r"layer features\.20, MaxPool2d.*size 1 .* kernel of size 2 \(stride 2\)"):
        models.vgg_a(10, (3, 16, 16))
    with pytest.raises(ValueError, match=r"layer classifier\.0, Linear.*48 features .*\(3, 4, 4\).*in_features = 47"):
        plan([Flatten(), Linear(47, 2)], (3, 4, 4), 1)
    with pytest.raises(ValueError, match="put Flatten before it"):
        plan([Linear(48, 2)], (3, 4, 4), 1)
    with pytest.raises(ValueError, match="4 channels, wanted in_channels = 3"):
        plan([Conv2d(3, 8, 3)], (4, 8, 8), 1)
    with pytest.raises(ValueError, match="vector of 48 features, wanted images"):
        plan([Flatten(), MaxPool2d(2)], (3, 4, 4), 1)


def test_first_layer_stays_unpadded_with_few_channels():
    def input_block(layers, shape):
        return plan(layers, shape, 1, machine=MACHINES[16]).input.block

    assert [input_block([Conv2d(c, 8, 1)], (c, 4, 4)) for c in (1, 3, 4, 5, 32)] == [1, 3, 4, 16, 16]
    assert input_block([Flatten(), Linear(784, 10)], (1, 28, 28)) == 1
    assert input_block([Linear(429, 10)], (429,)) == 16
    assert input_block([MaxPool2d(2)], (3, 4, 4)) == 16  # pooling kernels know whole blocks only


def test_relu_is_fused_and_the_first_input_gradient_is_not_made():
    layers = plan(CNN, (3, 6, 6), 4).layers
    assert [str(layer) for layer in layers][:2] == ["Conv2d 3x3 + ReLU", "Dropout 0.1"]
    assert [layer.index for layer in layers] == [0, 2, 3, 4, 5, 6, 7, 9, 10]
    assert layers[0].input_grad is None
    assert all(layer.input_grad for layer in layers[1:])
    before = plan([Flatten(), Dropout(), Linear(12, 3), Linear(3, 3)], (3, 2, 2), 1).layers
    assert [layer.input_grad is None for layer in before] == [True, True, True, False]
    assert all(layer.weight_grad is None for layer in plan(CNN, (3, 6, 6), 4, training=False).layers)


def test_pooling_is_fused_where_nothing_else_wants_what_is_pooled(vgg):
    def pooled(*pooling, **options):
        layers = [Conv2d(3, 8, 3, padding=1), ReLU(), *pooling, Conv2d(8, 8, 3), ReLU(), MaxPool2d(2)]
        made = plan(layers, (3, 28, 33), 4, **{"machine": MACHINES[8], "algorithm": "direct"} | options).layers
        return [layer.name for layer in made if layer.pooled]

    assert pooled(MaxPool2d(2)) == pooled(MaxPool2d(2), training=False) == ["0"]
    assert pooled(MaxPool2d(2), machine=dataclasses.replace(MACHINES[8], l2=1024)) == ["0"]  # ranks must agree
    assert pooled(MaxPool2d(2), exact=True) == pooled(MaxPool2d(2), partitions={"conv": Partition(1, 2)}, ranks=2) == []
    others = AvgPool2d(2), MaxPool2d(3, 2), MaxPool2d(2, 1), MaxPool2d(2, padding=1), MaxPool2d(2, ceil_mode=True)
    assert not any(map(pooled, others))
    layers = vgg.plan(32).layers
    assert str(layers[0]) == "Conv2d 3x3 + ReLU + MaxPool2d 2x2/2" and not any(layer.pooled for layer in layers[1:])
    assert layers[0].output.shape == (64, 112, 112) and layers[0].computed.shape == (64, 224, 224)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("width", [4, 8, 16])
def test_arrays_alive_together_do_not_share_memory(training, width):
    buffers = plan(CNN, (3, 6, 6), 5, training=training, machine=MACHINES[width]).buffers
    for one, other in itertools.combinations(buffers, 2):
        if one.first <= other.last and other.first <= one.last:
            assert one.offset + one.size <= other.offset or other.offset + other.size <= one.offset
    assert all(buffer.offset % 16 == 0 for buffer in buffers)


@pytest.mark.parametrize("training", [True, False])
def test_arena_is_no_larger_than_what_is_alive_at_once(vgg, training):
    """The placement is greedy; on the networks of the paper it is within 2 % of the bound."""
    made = vgg.plan(32, training=training)
    slots = range(max(buffer.last for buffer in made.buffers) + 1)
    alive = max(sum(b.size for b in made.buffers if b.first <= slot <= b.last) for slot in slots)
    assert alive <= made.arena_size <= 1.02 * alive


def test_in_place_only_where_backward_does_not_read_what_is_overwritten():
    def owner(made: Plan, layer: str) -> str:
        return next(buffer.name for buffer in made.buffers if (layer, "output") in buffer.roles)

    training = plan(CNN, (3, 6, 6), 4)
    assert owner(training, "features.2") == "features.2 output"  # dropout: the fused ReLU's mask is read again
    assert owner(training, "features.4") == "features.3 output"  # sigmoid on what a pooling wrote
    assert owner(training, "features.5") == "features.5 output"  # dropout: the sigmoid's output is read again
    assert owner(training, "flatten") == "features.5 output"
    inference = plan(CNN, (3, 6, 6), 4, training=False)
    assert owner(inference, "features.2") == "features.0 output"
    assert owner(plan([Dropout(), Linear(20, 2)], (20,), 1), "0") == "0 output"  # never the input


def test_messages_are_ordered_and_cover_every_weight():
    made = plan(CNN, (3, 6, 6), 7, ranks=3, machine=MACHINES[8])
    order = [(message.kind, message.layer) for message in made.messages]
    learning = ["features.0", "classifier.0", "classifier.3"]
    assert order[:3] == [("reduce_scatter", name) for name in reversed(learning)]
    assert order[3:] == [("allgather", name) for name in learning]
    sizes = {layer.name: layer.parameter_size for layer in made.layers}
    assert all(sum(message.sizes) == sizes[message.layer] and len(message.sizes) == 3 for message in made.messages)
    assert made.images == 3
    assert plan(CNN, (3, 6, 6), 7).messages == ()


def test_digest_tells_networks_apart():
    """A18: 500 against 501 units; and what differs can be read."""

    def description(width, **options):
        return plan([Linear(20, width), ReLU(), Linear(width, 5)], (20,), 12, ranks=2, **options)

    one, other = description(500), description(501)
    assert one.digest() == description(500).digest()
    assert one == description(500)
    assert hash(one) == hash(description(500))
    assert one.digest() != other.digest()
    assert "(500, 20)" in one.description()["layer 0"]
    assert "(501, 20)" in other.description()["layer 0"]
    assert description(500, machine=MACHINES[8]).digest() != description(500, machine=MACHINES[16]).digest()
    assert description(500, threads=1).digest() == description(500, threads=2).digest()  # ranks may differ in that


def test_table_shows_logical_counts_only():
    """A3."""
    made = plan([Conv2d(3, 2, 3), Flatten(), Linear(32, 6)], (3, 6, 6), 2, machine=MACHINES[16])
    table = str(made)
    assert made.parameter_count == (2 * 27 + 2) + (6 * 32 + 6)
    assert "2x4x4" in table
    assert " 56 " in table
    assert " 254 " in table
    assert "16x" not in table
    assert [parameter.shape for layer in made.layers for parameter in layer.parameters] == [
        (2, 3, 3, 3), (2,), (6, 32), (6,),
    ]  # fmt: skip


def test_memory_of_a_rank():
    one, four = (  # Winograd's scratch does not shrink with the images
        models.vgg_a().plan(64, ranks, algorithm="direct", partitions={"fc": Partition(ranks, 1)}) for ranks in (1, 4)
    )
    assert four.images == 16
    assert four.memory["parameters"] == one.memory["parameters"]
    assert four.memory["momentum of the owned shard"] == pytest.approx(one.memory["parameters"] / 4, rel=1e-6)
    # not exactly a quarter: whether a layer packs its input depends on the images
    assert four.memory["activations and scratch"] == pytest.approx(one.memory["activations and scratch"] / 4, rel=0.1)
    split = models.vgg_a().plan(64, 4)  # fully connected layers on grids: most weights only once
    assert split.memory["parameters"] < 0.4 * four.memory["parameters"]
    assert split.memory["momentum of the owned shard"] == pytest.approx(one.memory["parameters"] / 4, rel=0.01)
    assert dataclasses.replace(one, training=False).memory.keys() == {"parameters", "activations and scratch"}
    assert [format_bytes(n) for n in (0, 999, 1500, 2.5e6, 3e9)] == ["0 B", "999 B", "1.5 kB", "2.5 MB", "3.00 GB"]


# --- scaling.py -------------------------------------------------------------------------------------------------


def test_data_parallel_ratio_does_not_depend_on_the_filters():
    """Compute over communication is 1.5 * out_w * out_h * images at full overlap."""
    for ifm, ofm, kernel in [(3, 64, (3, 3)), (512, 512, (3, 3)), (96, 256, (5, 5))]:
        layer = Conv2d(ifm, ofm, kernel, padding=kernel[0] // 2).plan(Layout((ifm, 14, 12), 16), 2, MACHINES[16])
        flop = sum(made.flop for made in (layer.forward, layer.weight_grad, layer.input_grad))
        assert flop / scaling.data_parallel_bytes(ifm, ofm, kernel, overlap=1) == pytest.approx(1.5 * 14 * 12 * 2)


@pytest.mark.parametrize(("nodes", "minibatch", "groups"), [(64, 256, 2), (128, 512, 4), (1, 256, 1)])
def test_groups_of_a_fully_connected_layer(nodes, minibatch, groups):
    assert scaling.optimal_groups(nodes, minibatch, 4096, 4096) == groups


def test_optimal_groups_agrees_with_the_derivative():
    for nodes, minibatch, ofm in [(64, 256, 4096), (128, 512, 4096), (96, 1024, 1000), (16, 1024, 2048)]:
        best = scaling.best_groups(nodes, minibatch, ofm)
        inside = [g for g in range(2, nodes) if nodes % g == 0]
        volume = {g: scaling.hybrid_bytes(g, nodes, minibatch, 4096, ofm) for g in inside}
        chosen = min(inside, key=volume.get)
        below = max([g for g in inside if g <= best], default=inside[0])
        above = min([g for g in inside if g >= best], default=inside[-1])
        assert chosen in (below, above)
        optimal = scaling.optimal_groups(nodes, minibatch, 4096, ofm)
        assert scaling.hybrid_bytes(optimal, nodes, minibatch, 4096, ofm) <= volume[chosen]


def test_hybrid_ends_are_the_pure_forms():
    arguments = (16, 256, 4096, 1000)
    assert scaling.hybrid_bytes(16, *arguments) == scaling.data_parallel_bytes(4096, 1000)
    assert scaling.hybrid_bytes(1, *arguments) == scaling.model_parallel_bytes(4096, 256)
