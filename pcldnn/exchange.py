"""The exchanges of a layer on a grid of ranks, as functions of a communicator and arrays.

Activations: `gather_rows` and `add_rows`, `to_images` and `to_slices` are two pairs of adjoints, <F x, y> = <x, F* y>.
Each rank has `counts[rank]` images, its rows, and `widths[rank]` features, its columns.

Sums in tree order (exact mode, see grid.py): `sum_leaves` adds what one rank computes, `reduce_trees` goes on across
ranks. A partial sum is named by its leaves, (start, stop). Every rank sends each other one that one's share of its
partial sums and adds up its own: the bytes of a reduce-scatter, as long as a rank's leaves are one subtree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pcldnn.partition import bounds, subtrees

Sums = list[tuple[tuple[int, int], np.ndarray | None]]


# --- activations ------------------------------------------------------------------------------------------------


def gather_rows(communicator, own: np.ndarray, counts, rows: np.ndarray) -> None:
    """Fill `rows` with the rows of all ranks, one after the other."""
    start, stop = bounds(counts, communicator.rank)
    rows[start:stop] = own
    size = rows[0].size if len(rows) else 0
    communicator.allgather(rows.reshape(-1), [count * size for count in counts])


def add_rows(communicator, rows: np.ndarray, counts, own: np.ndarray) -> None:
    """Write the sum over ranks of this rank's rows to `own`; `rows` is used up. Adjoint of `gather_rows`."""
    size = rows[0].size if len(rows) else 0
    communicator.reduce_scatter(rows.reshape(-1), [count * size for count in counts])
    own[...] = rows[slice(*bounds(counts, communicator.rank))]


def to_images(communicator, columns: np.ndarray, counts, widths, own: np.ndarray, staging: np.ndarray) -> None:
    """From some columns (sum(counts), width) of all rows to all columns (count, sum(widths)) of this rank's rows."""
    pieces = _pieces(staging, counts[communicator.rank], widths)
    ranks = range(communicator.size)
    sends = [[columns[slice(*bounds(counts, peer))]] for peer in ranks]
    communicator.exchange(sends, [[piece] for piece in pieces])
    for peer, piece in enumerate(pieces):
        own[:, slice(*bounds(widths, peer))] = piece


def to_slices(communicator, own: np.ndarray, counts, widths, columns: np.ndarray, staging: np.ndarray) -> None:
    """The way back: inverse and adjoint of `to_images`."""
    pieces = _pieces(staging, counts[communicator.rank], widths)
    for peer, piece in enumerate(pieces):
        piece[...] = own[:, slice(*bounds(widths, peer))]
    receives = [[columns[slice(*bounds(counts, peer))]] for peer in range(communicator.size)]
    communicator.exchange([[piece] for piece in pieces], receives)


def _pieces(staging: np.ndarray, rows: int, widths) -> list[np.ndarray]:
    """For each rank a contiguous (rows, width) array in `staging`."""
    return [
        staging[rows * start : rows * stop].reshape(rows, stop - start)
        for start, stop in (bounds(widths, peer) for peer in range(len(widths)))
    ]


# --- sums in tree order -----------------------------------------------------------------------------------------


def sum_leaves(leaves: range, sizes, compute, buffers: list[np.ndarray]) -> Sums:
    """Sums of the largest whole subtrees of this rank's leaves.

    Parameters
    ----------
    leaves : range
    sizes : sequence of int
        Things in each leaf of the whole tree. An empty one counts for nothing: it is not even added as zero.
    compute : callable
        ``compute(leaf, array)`` overwrites the array with a leaf's value.
    buffers : list of ndarray
        At least `partition.tree_arrays` many.

    Returns
    -------
    list of ((start, stop), array)
        None for an array without anything in it. A single one that covers everything is `buffers[0]`.
    """
    free, sums = list(buffers), []
    for leaf in leaves:
        array = None
        if sizes[leaf]:
            array = free.pop(0)
            compute(leaf, array)
        sums.append(((leaf, leaf + 1), array))
        while len(sums) > 1 and _siblings(sums[-2][0], sums[-1][0]):
            (left, one), (right, other) = sums[-2:]
            sums[-2:] = [((left[0], right[1]), _add(one, other))]
            if one is not None and other is not None:
                free.insert(0, other)
    return sums


@dataclass(frozen=True)
class Tree:
    """A sum in tree order that ranks share.

    Attributes
    ----------
    sums : list of ((start, stop), array)
        As `sum_leaves` returns them, flat; used up within the spans.
    leaves : sequence of (start, stop)
        Of each rank.
    sizes : sequence of int
        As for `sum_leaves`.
    spans : sequence of (start, stop)
        The elements of each rank.
    out : ndarray
        Gets this rank's; may be a part of one of `sums`.
    """

    sums: Sums
    leaves: Sequence[tuple[int, int]]
    sizes: Sequence[int]
    spans: Sequence[tuple[int, int]]
    out: np.ndarray

    def sent(self, peer: int) -> list[tuple[int, int]]:
        """The partial sums that a rank has."""
        return [node for node in subtrees(*self.leaves[peer]) if any(self.sizes[slice(*node)])]

    def arriving(self, rank: int) -> int:
        """Elements that a rank gets from the others."""
        return self.out.size * sum(len(self.sent(peer)) for peer in range(len(self.leaves)) if peer != rank)


def reduce_trees(communicator, trees: Sequence[Tree], arrivals: np.ndarray) -> None:
    """Add the partial sums of all ranks in tree order, of several trees in one exchange.

    `arrivals` is memory for what the others send.
    """
    own, used = communicator.rank, 0
    sends, receives = ([[] for _ in range(communicator.size)] for _ in range(2))
    found = []
    for tree in trees:
        values = {node: array[slice(*tree.spans[own])] for node, array in tree.sums if array is not None}
        for peer in range(communicator.size):
            if peer == own:
                continue  # already in `values`
            sends[peer] += [array[slice(*tree.spans[peer])] for _, array in tree.sums if array is not None]
            for node in tree.sent(peer):
                values[node] = arrivals[used : used + tree.out.size]
                receives[peer].append(values[node])
                used += tree.out.size
        found.append(values)
    communicator.exchange(sends, receives)
    for tree, values in zip(trees, found):
        total = _total(values, 0, len(tree.sizes))
        tree.out[...] = 0 if total is None else total


def _total(values: dict[tuple[int, int], np.ndarray], start: int, stop: int) -> np.ndarray | None:
    """Value of a subtree from the values of subtrees within it; arrays are used up."""
    if (start, stop) in values or stop - start < 2:
        return values.get((start, stop))
    middle = (start + stop) // 2
    return _add(_total(values, start, middle), _total(values, middle, stop))


def _add(one: np.ndarray | None, other: np.ndarray | None) -> np.ndarray | None:
    """`one` += `other`; what is None has nothing in it."""
    if one is None or other is None:
        return other if one is None else one
    return np.add(one, other, out=one)


def _siblings(left: tuple[int, int], right: tuple[int, int]) -> bool:
    """Whether two subtrees, next to each other, hang on one node."""
    size = left[1] - left[0]
    return size == right[1] - right[0] and left[0] % (2 * size) == 0
