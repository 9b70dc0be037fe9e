"""Layers on grids of ranks, for tests/test_grid.py: ``grid_cases.py FOLDER CASE...`` under mpirun.

Each case is a function of (communicator, folder).
"""
import numpy as np
from small_runs import at_step_3, digest, divergence, fit, main, optimizer, some_digits, spoil

from pcldnn import (
    AvgPool2d,
    Conv2d,
    Dropout,
    Flatten,
    Linear,
    MaxPool2d,
    Network,
    Partition,
    ReLU,
    Sigmoid,
    Trainer,
    communicator,
    exchange,
)
from pcldnn.checkpoint import load
from pcldnn.data import ArrayDataset
from pcldnn.partition import shares


def grids(ranks):
    return [Partition(data, ranks // data) for data in range(1, ranks + 1) if ranks % data == 0]


def network():
    """Widths that divide by nothing; the first and the last layer are narrower than ranks times SIMD width."""
    return Network([Conv2d(1, 6, 5, stride=2, padding=2), ReLU(), MaxPool2d(2), Conv2d(6, 41, 3), ReLU(), Dropout(0.2),
                    MaxPool2d(2), Flatten(), Linear(41 * 3 * 3, 45), ReLU(), Dropout(0.5), Linear(45, 29), Sigmoid(),
                    Linear(29, 10)], (1, 32, 32), seed=3)


def settings(ranks):
    """Partitions to try: the plan's own, each grid for all layers, and a mixture."""
    possible = grids(ranks)
    yield "chosen", None
    for grid in possible:
        yield f"all {grid}", everywhere(grid)
    mixed = [possible[i % len(possible)] for i in range(5)]
    yield "mixed", dict(zip(("conv2", "conv1", "fc6", "classifier.3", "fc8"), mixed, strict=True))


def everywhere(grid):
    """All layers on this grid."""
    return {"conv": grid, "fc": grid}


def train(comm, partitions, exact, data, threads=1, **options):
    trainer = Trainer(network(), optimizer(), comm, threads=threads, partitions=partitions, exact=exact)
    digests = []
    found = fit(trainer, data, some_digits(5), digest_interval=1,
                callback=lambda record: digests.append(record.get("digest")), **{"minibatch": 21, "epochs": 2, **options})
    again = trainer.evaluate(some_digits(5), 3)
    return {**found, "bits": digests[-2], "again": list(vars(again).values())}


def training(comm, folder):
    """Every grid: minibatches of 21 and 11 samples."""
    data, found = some_digits(53), {}
    for name, partitions in settings(comm.size):
        for exact in (False, True):
            found[f"{name} {'exact' if exact else 'default'}"] = train(comm, partitions, exact, data)
    found["2 threads exact"] = train(comm, everywhere(grids(comm.size)[0]), True, data, threads=2)
    return found


def few(comm, folder):
    """A14: fewer samples than ranks, in the last minibatch, in every minibatch, in the data set."""
    found = {}
    for name, partitions in settings(comm.size):
        for exact in (False, True) if name in ("chosen", "mixed") else ():
            runs = [train(comm, partitions, exact, some_digits(count), minibatch=minibatch)
                    for count, minibatch in ((5, 4), (3, 1), (2, 50))]
            found[f"{name} {'exact' if exact else 'default'}"] = runs
    return found


def resumed(comm, folder):
    """A25: half-way on one grid, then on another, from a checkpoint; in exact mode the bits of a straight run."""
    data, found = some_digits(53), {}
    possible = grids(comm.size)
    path = folder / "half.safetensors"
    for exact in (False, True):
        train(comm, everywhere(possible[0]), exact, data, steps=2, checkpoint=path)
        comm.barrier()
        found["exact" if exact else "default"] = train(comm, everywhere(possible[-1]), exact, data, resume=path)
    if comm.rank == 0:
        kept, _ = load(path)
        (folder / f"exact{comm.size}.safetensors").write_bytes(path.read_bytes())
        found["names"] = sorted(kept)
    return found


def diverged(comm, folder):
    """A NaN in one sample: the culprit is found although layers are shared."""
    partitions = everywhere(grids(comm.size)[0])
    return divergence(Trainer(network(), optimizer(), comm, threads=1, partitions=partitions), some_digits(12, spoil))


def stop(comm, folder):
    """A19: one rank asks, all stop after the same step."""
    trainer = Trainer(network(), optimizer(), comm, threads=1, partitions=everywhere(grids(comm.size)[0]))
    callback = at_step_3(comm, lambda: trainer.request_stop("enough"))
    result = trainer.fit(some_digits(10), minibatch=2, epochs=3, verbose=False, callback=callback)
    return {"step": result.step, "stopped": result.stopped}


def split(comm, folder):
    """What a rank holds of a split layer, and what users get from it; then a step without any grid."""
    net = network()
    whole = net.state_dict()
    net.prepare(8, comm, 1, partitions=everywhere(Partition(1, comm.size)))
    held = {name: array.size for name, array in net.parameters.items()}
    same = {name: bool(np.array_equal(value, whole[name])) for name, value in net.state_dict().items()}
    outputs = net.forward(np.ones((comm.rank, 1, 32, 32), np.float32))     # each rank another number of images
    was_split, opt = net.is_split, optimizer()
    net.forward_loss(np.ones((shares(8, comm.size)[comm.rank], 1, 32, 32), np.float32),
                     [1] * shares(8, comm.size)[comm.rank], global_count=8)
    net.backward()
    gradients = net.gradients()
    before = digest(net)
    net.update(opt)
    momentum = opt.state_dict(net)
    after = digest(net)
    net.join()
    kept = all(np.array_equal(value, momentum[name]) for name, value in opt.state_dict(net).items())
    opt.load_state_dict(momentum, net)
    joined = digest(net)
    net.load_state_dict(whole)
    again = net.forward(np.ones((comm.rank, 1, 32, 32), np.float32))
    return {"held": held, "same": all(same.values()), "was_split": was_split, "is_split": net.is_split,
            "shape": list(outputs.shape), "changed": before != after == joined,
            "kept": bool(kept and momentum), "names": sorted(gradients) == sorted(whole),
            "close": bool(np.allclose(outputs, again, rtol=1e-5, atol=1e-6))}


def chunks(comm, folder):
    """`exchange` in messages of 3 elements at most: uneven, empty and own arrays; and what it refuses."""
    small = communicator.Communicator(comm._comm, max_count=3) if comm.size > 1 else comm
    ranks = range(comm.size)
    sends = [[np.arange(4 * comm.rank + peer, dtype=np.float32) + comm.rank, np.empty(0, np.float32)] for peer in ranks]
    receives = [[np.full(4 * peer + comm.rank, -1, np.float32), np.empty(0, np.float32)] for peer in ranks]
    small.exchange(sends, receives)
    right = all(np.array_equal(receives[peer][0], np.arange(4 * peer + comm.rank) + peer) for peer in ranks)
    messages = []
    for wrong in ([[]] * (comm.size + 1), [[np.zeros((4, 4))[:, 1]]] * comm.size):
        try:
            small.exchange(wrong, receives)
        except ValueError as error:
            messages.append(str(error))
    if small is not comm:
        small.close()
    return {"right": right, "messages": messages}


def refused(comm, folder):
    """Images that are not this rank's share cannot be worked on together."""
    net = network()
    net.prepare(8 * comm.size, comm, 1, partitions={"fc": Partition(1, comm.size)}, exact=True)
    try:
        net.forward_loss(np.zeros((7, 1, 32, 32), np.float32), [0] * 7, global_count=8 * comm.size)
    except ValueError as error:
        return str(error)
    return "accepted"


def adjoint(comm, folder):
    """<F x, y> = <x, F* y> for both pairs of exchanges, for random grids, rows and columns, some of them empty."""
    random = np.random.default_rng(0)       # the same numbers on all ranks
    worst = 0.0
    for grid in grids(comm.size) * 3:
        group, _ = grid.place(comm.rank)
        _, model = comm.grid(grid)
        for _ in range(3):
            counts = random.integers(0, 4, comm.size)[grid.group(group).start : grid.group(group).stop].tolist()
            widths = (8 * random.integers(0, 3, grid.model)).tolist()
            worst = max(worst, gathering(model, counts, int(random.integers(1, 6)), comm),
                        moving(model, counts, widths, comm))
    return worst


def mismatch(comm, fx, y, x, back):
    sums = comm.allreduce_sum(np.array([(fx * y).sum(dtype=np.float64), (x * back).sum(dtype=np.float64)]))
    return float(abs(sums[0] - sums[1]) / (1 + abs(sums[0])))


def gathering(model, counts, features, comm):
    local = np.random.default_rng(comm.rank)
    own = local.standard_normal((counts[model.rank], features)).astype(np.float32)
    rows, y = (local.standard_normal((sum(counts), features)).astype(np.float32) for _ in range(2))
    exchange.gather_rows(model, own, counts, rows)
    back, kept = np.empty_like(own), y.copy()
    exchange.add_rows(model, y, counts, back)
    return mismatch(comm, rows, kept, own, back)


def moving(model, counts, widths, comm):
    local = np.random.default_rng(comm.rank)
    columns = local.standard_normal((sum(counts), widths[model.rank])).astype(np.float32)
    y = local.standard_normal((counts[model.rank], sum(widths))).astype(np.float32)
    own, back, staging = np.empty_like(y), np.empty_like(columns), np.empty(y.size, np.float32)
    exchange.to_images(model, columns, counts, widths, own, staging)
    exchange.to_slices(model, y, counts, widths, back, staging)
    return mismatch(comm, own, y, columns, back)


def tree(comm, folder):
    """The tree over 16 leaves of numbers of very different size: the same bits, however ranks share the leaves."""
    random = np.random.default_rng(5)
    values = (random.standard_normal((16, 40)) * 10.0 ** random.integers(-6, 6, (16, 40))).astype(np.float32)
    sizes = random.integers(0, 2, 16).tolist()
    from pcldnn.partition import bounds, shard_sizes, share, tree_arrays
    from pcldnn.transfer import piece_spans
    leaves = [share(16, comm.size, rank) for rank in range(comm.size)]
    own = leaves[comm.rank]
    buffers = [np.empty(40, np.float32) for _ in range(tree_arrays(*own))]
    sums = exchange.sum_leaves(range(*own), sizes, lambda leaf, out: np.copyto(out, values[leaf]), buffers)
    shards = shard_sizes(40, comm.size, 8)
    out = np.empty(shards[comm.rank], np.float32)
    pieces = [piece_spans(shards, index, 3) for index in range(3)]
    starts = np.array([spans[comm.rank] for spans in pieces]) - sum(shards[: comm.rank])
    trees = [exchange.Tree(sums, leaves, sizes, spans, out[slice(*own)]) for spans, own in zip(pieces, starts)]
    for together in (trees[:1], trees[1:]):
        exchange.reduce_trees(comm, together, np.empty(16 * 40, np.float32))
    total = np.empty(40, np.float32)
    total[slice(*bounds(shards, comm.rank))] = out
    comm.allgather(total, shards)
    return total.view(np.uint32).tolist()


def frames(comm, folder):
    """A network without convolutions, every layer on its own grid."""
    random = np.random.default_rng(0)
    data = ArrayDataset(random.standard_normal((41, 19)).astype(np.float32), random.integers(0, 7, 41), 7)
    net = Network([Linear(19, 33), Sigmoid(), Linear(33, 50), Sigmoid(), Linear(50, 7)], (19,), seed=2)
    possible = grids(comm.size)
    partitions = {f"fc{i + 1}": possible[-1 - i % len(possible)] for i in range(3)}
    trainer = Trainer(net, optimizer(), comm, threads=1, partitions=partitions, exact=16)
    result = trainer.fit(data, minibatch=23, epochs=2, verbose=False)
    return {"weights": digest(net), "losses": result.losses}


def winograd(comm, folder):
    """Convolutions by Winograd in all passes; slices begin at any block of channels, and some are empty."""
    random = np.random.default_rng(0)
    data = ArrayDataset(random.standard_normal((11, 1, 8, 8)).astype(np.float32), random.integers(0, 5, 11), 5)
    found = {}
    for grid in grids(comm.size):
        for exact in (False, True):
            net = Network([Conv2d(1, 37, 3, padding=1), ReLU(), Conv2d(37, 70, 3, padding=1), ReLU(), AvgPool2d(2),
                           Conv2d(70, 41, 3, padding=1, bias=False), Flatten(), Linear(41 * 16, 5)], (1, 8, 8), seed=2,
                          algorithm="winograd")
            trainer = Trainer(net, optimizer(), comm, threads=1, partitions={"conv": grid}, exact=exact)
            found[f"{grid} {'exact' if exact else 'default'}"] = fit(trainer, data, minibatch=7)
    return found


if __name__ == "__main__":
    main(globals())
