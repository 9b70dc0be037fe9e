"""How a layer is spread over ranks, and who owns which part: integer arithmetic only.

Wherever something is cut for several ranks (images of a minibatch, elements of a weight array), it is cut by
`shares`: consecutive pieces whose sizes differ by at most one, the larger ones first, empty ones last.

Exact mode cuts in two steps: first in a number of pieces that does not depend on ranks, then ranks take whole pieces
(`block_shares`). Sums over pieces go up a binary tree whose leaves they are: pieces 2i and 2i + 1 meet first, and so
on. What one rank can add by itself are the `subtrees` of its own pieces.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Partition:
    """A grid of `data` x `model` ranks for one layer.

    Parameters
    ----------
    data : int
        Parts of the minibatch: the paper's number of groups, G.
    model : int
        Parts of the weights inside a group, M. 1 is data parallel; data = 1 is model parallel.

    Rank r is member r % M of group r // M: the images of a group's ranks, one after the other, are consecutive.
    """

    data: int = 1
    model: int = 1

    def __post_init__(self):
        if self.data < 1 or self.model < 1:
            raise ValueError(f"Partition: got data={self.data}, model={self.model}, wanted both at least 1")

    @property
    def ranks(self) -> int:
        return self.data * self.model

    @classmethod
    def parse(cls, text: str) -> Partition:
        """From "2x4": data = 2, model = 4."""
        data, x, model = text.partition("x")
        if not (x and data.isdecimal() and model.isdecimal()):
            raise ValueError(f"Partition: got {text!r}, wanted data x model, such as 2x4")
        return cls(int(data), int(model))

    def place(self, rank: int) -> tuple[int, int]:
        """(group, member) of a rank."""
        return divmod(rank, self.model)

    def group(self, group: int) -> range:
        """The ranks of a group."""
        return range(group * self.model, (group + 1) * self.model)

    def __str__(self) -> str:
        return f"{self.data}x{self.model}"


def shares(count: int, parts: int) -> tuple[int, ...]:
    """Sizes of `parts` consecutive pieces of `count` things."""
    if count < 0 or parts < 1:
        raise ValueError(f"shares: got count={count}, parts={parts}, wanted count >= 0 and parts >= 1")
    size, larger = divmod(count, parts)
    return (size + 1,) * larger + (size,) * (parts - larger)


def share(count: int, parts: int, index: int) -> tuple[int, int]:
    """Start and stop of piece `index` of `shares(count, parts)`."""
    if not 0 <= index < parts:
        raise ValueError(f"share: got index={index}, wanted 0 <= index < parts = {parts}")
    size, larger = divmod(count, parts)
    start = index * size + min(index, larger)
    return start, start + size + (index < larger)


def shard_sizes(elements: int, owners: int, vector: int) -> tuple[int, ...]:
    """Elements of an array that each owner sums, updates and sends (the paper's strips).

    Cut in whole SIMD vectors of `vector` elements, so that no vector has two owners; only the end of an array whose
    size does not divide may be a part of one.
    """
    ends = [min(vector * share(-(-elements // vector), owners, index)[1], elements) for index in range(owners)]
    return tuple(end - start for start, end in zip([0, *ends], ends))


def bounds(sizes: tuple[int, ...], index: int) -> tuple[int, int]:
    """Start and stop of piece `index` when pieces of `sizes` follow each other."""
    start = sum(sizes[:index])
    return start, start + sizes[index]


# --- exact mode -------------------------------------------------------------------------------------------------


def block_shares(count: int, blocks: int, parts: int) -> tuple[int, ...]:
    """Sizes of consecutive pieces when `count` things are cut in `blocks` and each part gets whole blocks."""
    sizes = shares(count, blocks)
    return tuple(sum(sizes[slice(*share(blocks, parts, index))]) for index in range(parts))


def subtrees(start: int, stop: int) -> tuple[tuple[int, int], ...]:
    """The fewest whole subtrees that have the leaves start..stop-1 together, each as (start, stop), from the left.

    >>> subtrees(0, 8), subtrees(3, 6)
    (((0, 8),), ((3, 4), (4, 6)))
    """
    found = []
    while start < stop:
        size = 1
        while start % (2 * size) == 0 and start + 2 * size <= stop:
            size *= 2
        found.append((start, start + size))
        start += size
    return tuple(found)


def tree_arrays(start: int, stop: int) -> int:
    """Most partial sums held at a time when leaves start..stop-1 are computed and added one after the other."""
    return max((len(subtrees(start, leaf)) for leaf in range(start, stop)), default=0) + (stop > start)
