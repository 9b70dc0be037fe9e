"""How a layer is spread over ranks, and who owns which part: integer arithmetic only.

Wherever something is cut for several ranks (images of a minibatch, elements of a weight array), it is cut by
`shares`: consecutive pieces whose sizes differ by at most one, the larger ones first, empty ones last.
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
    """

    data: int = 1
    model: int = 1

    def __post_init__(self):
        if self.data < 1 or self.model < 1:
            raise ValueError(f"Partition: got data={self.data}, model={self.model}, wanted both at least 1")

    @property
    def ranks(self) -> int:
        return self.data * self.model

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
